"""Batches are the user's own, whatever is done to them, and show what the buffer's arrays hold at that time."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch as th

from sb3_extra_buffers.gpu_buffers import kernels
from tests.gpu.helpers import IMAGES, SLOTS, SPACES, recorded, replay_pair, rollout_pair
from tests.transitions import add_to_replay, add_to_rollout, assert_same, copied, sample_both

needs_cuda = pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")


def filled(device: str, space: str = "channels first", slots: int = SLOTS, **kwargs: Any) -> list[Any]:
    buffers = replay_pair(SPACES[space], device, slots=slots, **kwargs)
    for transition in recorded(space, 2)[: slots + 5]:
        add_to_replay(buffers, transition)
    return buffers


def filled_rollout(device: str, space: str = "channels first", **kwargs: Any) -> list[Any]:
    buffers = rollout_pair(SPACES[space], device, **kwargs)
    for transition in recorded(space, 2)[:SLOTS]:
        add_to_rollout(buffers, transition)
    for buffer in buffers:
        buffer.compute_returns_and_advantage(th.ones(2), np.zeros(2))
    return buffers


def tensors_of(batch: Any) -> list[th.Tensor]:
    found: list[th.Tensor] = []
    for part in batch:
        found += part.values() if isinstance(part, dict) else [] if part is None else [part]
    return found


def assert_apart(tensors: list[th.Tensor]) -> None:
    """No tensor looks changed when another is."""
    before = [tensor._version for tensor in tensors]
    for i, tensor in enumerate(tensors):
        tensor.add_(1)
        assert [other._version - old for other, old in zip(tensors, before, strict=True)] == [
            int(j <= i) for j in range(len(tensors))
        ]


@pytest.mark.parametrize("space", ["float32", "channels first", "Dict"])
@pytest.mark.parametrize("method", ["none", "delta", "rle"])
def test_tensors_of_batches_have_their_own_version_counters(method: str, space: str, device: str) -> None:
    _, ours = filled(device, space, compression_method=method)
    _, rollout = filled_rollout(device, space, compression_method=method)
    assert_apart([tensor for _ in range(3) for tensor in tensors_of(ours.sample(16))])
    assert_apart([tensor for batch in rollout.get(16) for tensor in tensors_of(batch)])


@pytest.mark.parametrize("method", ["none", "delta"])
def test_a_tensor_that_is_kept_keeps_no_more_than_itself(method: str, device: str) -> None:
    _, ours = filled(device, compression_method=method)
    for tensor in tensors_of(ours.sample(16)):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


WAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "an item": lambda array: array.__setitem__((3, 1), 2),
    "a slice": lambda array: array.__setitem__(slice(3, 7), 3),
    "in-place arithmetic": lambda array: np.add(array, 1, out=array),
    "np.copyto": lambda array: np.copyto(array, 3),
    ".flat": lambda array: array.flat.__setitem__(slice(None), 4),
    "np.put": lambda array: np.put(array, np.arange(array.size), 5),
    "np.putmask": lambda array: np.putmask(array, array == array, 6),
    "setfield": lambda array: array.setfield(7, array.dtype),
    "a view": lambda array: array.view(np.ndarray)[::2].__setitem__(Ellipsis, 8),
    "np.asarray": lambda array: np.asarray(array).__setitem__(Ellipsis, 9),
    "a memoryview": lambda array: np.asarray(memoryview(array)).fill(10),
    "sort": lambda array: array.sort(axis=0),
}


@pytest.mark.parametrize("name", ["actions", "rewards", "dones", "timeouts"])
@pytest.mark.parametrize("way", WAYS)
def test_fields_may_be_written_in_any_way(way: str, name: str, device: str) -> None:
    buffers = filled(device, compression_method="delta", frame_stack=4)
    sample_both(*buffers, batch_size=8, seed=0)
    for buffer in buffers:
        WAYS[way](getattr(buffer, name))
    sample_both(*buffers, batch_size=60, seed=1)
    add_to_replay(buffers, recorded("channels first", 2)[50])
    sample_both(*buffers, batch_size=60, seed=2)


def test_a_field_that_somebody_keeps(either_way: str, device: str) -> None:
    buffers = filled(device, compression_method="none")
    part = [buffer.rewards[4:20:3] for buffer in buffers]
    timeouts = [np.asarray(buffer.timeouts) for buffer in buffers]
    for step, transition in enumerate(recorded("channels first", 2)[:12]):
        for rewards, cut in zip(part, timeouts, strict=True):
            rewards += step
            cut[step] = 1
        sample_both(*buffers, batch_size=8, seed=step)
        add_to_replay(buffers, transition)
    assert buffers[1]._fields.are_shared
    del part, timeouts, rewards, cut
    assert not buffers[1]._fields.are_shared
    sample_both(*buffers, batch_size=20, seed=99)
    buffers[1].check_device()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_field_that_is_replaced(dtype: object, device: str) -> None:
    buffers = filled(device, compression_method="delta", frame_stack=4)
    for buffer in buffers:
        buffer.rewards = np.full(buffer.rewards.shape, 11.5, dtype=dtype)
    for transition in recorded("channels first", 2)[:5]:
        add_to_replay(buffers, transition)
        buffers[0].rewards[7] = buffers[1].rewards[7] = 3
        sample_both(*buffers, batch_size=60, seed=0)


@pytest.mark.parametrize("method", ["none", "delta"])
@pytest.mark.parametrize("options", [{"normalize_images": True}, {"output_dtype": "float"}], ids=str)
def test_exports_have_observations_as_they_were_added(
    method: str, options: dict[str, Any], either_way: str, device: str
) -> None:
    plain, ours = replay_pair(IMAGES, device, 1, slots=8, compression_method=method, frame_stack=4, **options)
    for step in recorded("channels first", 1)[:11]:
        add_to_replay([plain, ours], step)
    exported = ours.to_sb3()
    assert_same(exported.observations, plain.observations)
    assert_same(exported.next_observations, plain.next_observations)
    assert_same(next(ours.to_numpy())["observations"], np.roll(plain.observations, -plain.pos, axis=0))


def test_fields_are_saved_as_they_are(device: str) -> None:
    plain, ours = filled(device, compression_method="delta", frame_stack=4)
    np.copyto(plain.rewards, 5.0)
    np.copyto(ours.rewards, 5.0)
    assert_same(np.asarray(ours.rewards), np.asarray(plain.rewards))
    assert ours._state()["fields"]["rewards"].min() == 5


@pytest.mark.parametrize("space", ["channels first", "Dict"])
def test_numbers_of_a_rollout_may_change_between_batches(space: str, device: str) -> None:
    buffers = filled_rollout(device, space)
    for epoch in range(3):
        batches = []
        for buffer in buffers:
            np.random.seed(epoch)
            found = []
            for i, batch in enumerate(buffer.get(16)):
                found.append(batch)
                buffer.advantages[:] = (buffer.advantages - buffer.advantages.mean()) * 1.5
                np.copyto(buffer.actions, i)
                buffer.returns = buffer.returns + i
            if epoch == 1:
                buffer.values = buffer.values.astype(np.float64)
            batches.append(tuple(found))
        assert_same(batches[1], batches[0])


class TestInferenceMode:
    @pytest.mark.parametrize("source", ["host", "device"])
    @pytest.mark.parametrize("method", ["none", "delta", "rle"])
    def test_what_begins_in_it_goes_on_outside(self, method: str, source: str, either_way: str, device: str) -> None:
        plain, ours = replay_pair(IMAGES, device, compression_method=method, frame_stack=4)
        for step, transition in enumerate(recorded("channels first", 2)[: 30 if either_way == "kernels" else None]):
            with th.inference_mode(step < 15 or step % 3 == 0):
                plain.add(*copied(transition))
                obs, next_obs, *rest = copied(transition)
                if source == "device":
                    obs, next_obs = th.tensor(obs, device=device), th.tensor(next_obs, device=device)
                ours.add(obs, next_obs, *rest)
                if step % 10 == 0:
                    ours.sample(2).observations.sub_(1)
            if step % 25 == 24:
                sample_both(plain, ours, batch_size=8, seed=step)

    @pytest.mark.parametrize("method", ["none", "delta"])
    def test_rollouts(self, method: str, either_way: str, device: str) -> None:
        buffers = rollout_pair(IMAGES, device, slots=6, compression_method=method, frame_stack=4)
        for first in (0, 6, 12):
            for buffer in buffers:
                with th.inference_mode(first != 6):
                    buffer.reset()
            with th.inference_mode():
                for transition in recorded("channels first", 2)[first : first + 6]:
                    add_to_rollout(buffers, transition)
            batches = []
            for buffer in buffers:
                np.random.seed(0)
                batches.append(tuple(buffer.get(16)))
            assert_same(*batches[::-1])


class TestMemory:
    @needs_cuda
    def test_places_are_read_before_their_memory_is_used_again_cuda(self) -> None:
        plain, ours = filled("cuda", compression_method="delta", frame_stack=4)
        ours.sample(64)  # compiles
        th.cuda._sleep(200_000_000)
        found = []
        for seed in range(50):  # while the device does something else
            np.random.seed(seed)
            found.append(ours.sample(64))
        for seed, batch in enumerate(found):
            np.random.seed(seed)
            assert_same(batch, plain.sample(64))

    @needs_cuda
    def test_nothing_is_left_of_a_buffer_cuda(self) -> None:
        th.zeros(1, device="cuda")
        gc.collect()
        before = th.cuda.memory_allocated()
        buffers = filled("cuda", compression_method="delta", frame_stack=4)
        for n in range(1, 72):
            buffers[1].sample(n)
        del buffers
        gc.collect()
        th.cuda.synchronize()
        assert th.cuda.memory_allocated() - before < 1 << 16

    @needs_cuda
    def test_a_buffer_that_is_gone_leaves_its_last_batch_alone_cuda(self) -> None:
        plain, ours = filled("cuda", compression_method="delta", frame_stack=4)
        ours.sample(64)
        th.cuda._sleep(400_000_000)
        np.random.seed(0)
        found = ours.sample(64)
        del ours
        gc.collect()
        [th.full((3, 64), 7, dtype=th.int64, pin_memory=True) for _ in range(64)]
        np.random.seed(0)
        assert_same(found, plain.sample(64))


class TestStreams:
    """Of CUDA: work on one does not wait for work on another unless it is told to."""

    @needs_cuda
    @pytest.mark.parametrize("method", ["delta", "rle", "none"])
    @pytest.mark.parametrize("source", ["host", "device"])
    def test_taken_in_turns_cuda(self, method: str, source: str) -> None:
        plain, ours = filled("cuda", compression_method=method, frame_stack=4)
        streams = [th.cuda.default_stream(), th.cuda.Stream(), th.cuda.Stream()]
        for stream in streams:  # compiles
            with th.cuda.stream(stream):
                ours.sample(30)
        steps = itertools.cycle(recorded("channels first", 2))
        for turn in range(12):
            stream, other = streams[turn % 3], streams[(turn + 1) % 3]
            with th.cuda.stream(stream):
                th.cuda._sleep(50_000_000)
                for _ in range(30):
                    transition = next(steps)
                    plain.add(*copied(transition))
                    obs, next_obs, *rest = copied(transition)
                    if source == "device":
                        obs, next_obs = th.tensor(obs, device="cuda"), th.tensor(next_obs, device="cuda")
                    ours.add(obs, next_obs, *rest)
            np.random.seed(turn)
            expected = plain.sample(30)
            np.random.seed(turn)
            with th.cuda.stream(other):
                found = ours.sample(30)
            other.synchronize()
            assert_same(found, expected)

    @needs_cuda
    def test_observations_that_are_freed_after_add_cuda(self) -> None:
        plain, ours = filled("cuda", compression_method="delta", frame_stack=4)
        side, transitions = th.cuda.Stream(), recorded("channels first", 2)
        ours.add(*(th.tensor(part, device="cuda") for part in transitions[60][:2]), *transitions[60][2:])
        plain.add(*copied(transitions[60]))
        th.cuda.synchronize()
        with th.cuda.stream(side):
            obs, next_obs = (th.tensor(part, device="cuda") for part in transitions[61][:2])
        side.synchronize()
        th.cuda._sleep(200_000_000)
        ours.add(obs, next_obs, *transitions[61][2:])
        plain.add(*copied(transitions[61]))
        del obs, next_obs
        with th.cuda.stream(side):
            [th.full((2, *IMAGES.shape), 255, dtype=th.uint8, device="cuda") for _ in range(8)]
        th.cuda.synchronize()
        sample_both(plain, ours, batch_size=100, seed=0)


@pytest.mark.parametrize(
    ("version", "good"), [("2.9.9", False), ("3.2.0", False), ("3.3.0", True), ("3.10.0", True), ("4.0.0rc1", True)]
)
def test_triton_must_be_new_enough(version: str, good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", version)
    kernels.has_triton.cache_clear()
    try:
        assert kernels.has_triton() == good
        assert kernels.uses_triton(th.device("cuda")) == good
        assert not kernels.uses_triton(th.device("mps"))
    finally:
        kernels.has_triton.cache_clear()
