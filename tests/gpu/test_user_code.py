"""What users do around a buffer: other threads, compiled networks, CUDA graphs of their own, several GPUs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch as th

from tests.gpu.helpers import IMAGES, recorded, replay_pair
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
