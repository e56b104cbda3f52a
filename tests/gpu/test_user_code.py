"""What users do around a buffer: other threads, compiled networks, CUDA graphs of their own, several GPUs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch as th

from sb3_extra_buffers.gpu_buffers import driver
from tests.gpu.helpers import IMAGES, SPACES, recorded, replay_pair
from tests.transitions import add_to_replay, assert_same, sample_both

needs_cuda = pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")
needs_two_gpus = pytest.mark.skipif(th.cuda.device_count() < 2, reason="needs two GPUs")


def filled(device: str, method: str = "delta") -> tuple[Any, Any]:
    plain, ours = replay_pair(IMAGES, device, slots=40, compression_method=method, frame_stack=4)
    for transition in recorded("channels first", 2)[:60]:
        add_to_replay([plain, ours], transition)
    return plain, ours


def network() -> th.nn.Module:
    th.manual_seed(0)
    size = int(np.prod(IMAGES.shape))
    return th.nn.Sequential(th.nn.Flatten(), th.nn.Linear(size, 16), th.nn.ReLU(), th.nn.Linear(16, 1)).cuda()


def test_a_move_waits_for_other_threads(device: str) -> None:
    _, ours = filled(device)
    thread = threading.Thread(target=ours.to, args=("cpu",))
    with ours._lock.held:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(60)
    assert not thread.is_alive()


def test_a_move_that_failed_can_be_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    there = "cuda" if th.cuda.is_available() else "meta"
    plain, ours = replay_pair(SPACES["Dict"], "cpu", compression_method="delta", frame_stack=None)
    for transition in recorded("Dict", 2)[:20]:
        add_to_replay([plain, ours], transition)
    last = list(ours._stores.values())[-1]

    def no_memory(device: th.device) -> None:
        raise th.cuda.OutOfMemoryError(f"no memory on {device}")

    monkeypatch.setattr(last, "to", no_memory)
    with pytest.raises(th.cuda.OutOfMemoryError):
        ours.to(there)
    monkeypatch.undo()
    ours.to("cpu")
    assert {store.device.type for store in ours._stores.values()} == {"cpu"}
    sample_both(plain, ours, batch_size=20, seed=0)
    ours.check()


@needs_cuda
@pytest.mark.parametrize("method", ["none", "delta"])
def test_without_the_driver_torch_does_its_work_cuda(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_driver", lambda: None)
    monkeypatch.setattr(driver, "_LARGE", 1)
    plain, ours = filled("cuda", method)
    sample_both(plain, ours, batch_size=20, seed=0)
    ours.check()


@needs_cuda
def test_a_thread_that_has_not_used_cuda_yet_cuda() -> None:
    plain, ours = filled("cuda")
    np.random.seed(1)
    expected = plain.sample(20)
    found: list[Any] = []

    def work() -> None:
        np.random.seed(1)
        found.append(ours.sample(20))

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(found) == 2
    assert_same(found[0], expected)


@needs_cuda
@pytest.mark.filterwarnings("ignore")  # torch warns about its own settings
def test_a_compiled_network_cuda() -> None:
    plain, ours = filled("cuda")
    eager = network()
    compiled = th.compile(eager)
    for seed in range(3):
        np.random.seed(seed)
        expected = eager(plain.sample(20).observations.float())
        np.random.seed(seed)
        found = compiled(ours.sample(20).observations.float())
        th.testing.assert_close(found, expected)


@needs_cuda
def test_a_cuda_graph_of_the_training_step_cuda() -> None:
    plain, ours = filled("cuda")
    captured, eager = network(), network()
    batch = ours.sample(20).observations.float()
    side = th.cuda.Stream()
    side.wait_stream(th.cuda.current_stream())
    with th.cuda.stream(side):  # as torch asks for
        captured(batch).mean().backward()
    th.cuda.current_stream().wait_stream(side)
    graph = th.cuda.CUDAGraph()
    captured.zero_grad(set_to_none=True)
    with th.cuda.graph(graph):
        captured(batch).mean().backward()
    for seed, transition in enumerate(recorded("channels first", 2)[60:70]):
        add_to_replay([plain, ours], transition)
        np.random.seed(seed)
        batch.copy_(ours.sample(20).observations)
        graph.replay()
        eager.zero_grad()
        np.random.seed(seed)
        eager(plain.sample(20).observations.float()).mean().backward()
        for mine, theirs in zip(captured.parameters(), eager.parameters(), strict=True):
            th.testing.assert_close(mine.grad, theirs.grad)


@needs_two_gpus
@pytest.mark.parametrize("method", ["delta", "rle", "none"])
def test_a_gpu_that_is_not_the_current_one_cuda(method: str) -> None:
    plain, ours = filled("cuda:1", method)
    assert ours.buffer_device == th.device("cuda", 1)
    assert ours.sample(5).observations.device == th.device("cuda", 1)
    sample_both(plain, ours, batch_size=30, seed=0)
    ours.to("cuda:0")
    sample_both(plain, ours, batch_size=30, seed=1)
    ours.check()
