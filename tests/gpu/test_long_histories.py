"""Many rollouts one after the other, and replay buffers that are overwritten many times, are still exact."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.gpu_buffers import device_arena, device_writer
from sb3_extra_buffers.gpu_buffers.device_arena import DeviceArena, HeapBudget
from tests.gpu.helpers import replay_pair, rollout_pair
from tests.transitions import Transition, assert_same, sample_both

SPACE = spaces.Box(0, 255, (4, 6, 6), np.uint8)
N_ENVS = 3


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_writer, "encodes_on", lambda device, codec: codec.name != "zstd")


def history(seed: int) -> Any:
    """Scenes that change, frames that repeat, episodes that begin with zeros, and environments that differ in it."""
    rng = np.random.default_rng(seed)
    scenes = rng.integers(0, 9, size=(N_ENVS, 6, 6), dtype=np.uint8)
    stacks = np.zeros((N_ENVS, *SPACE.shape), np.uint8)
    while True:
        before = stacks.copy()
        for env in range(N_ENVS):
            if rng.random() < 0.05 * (env + 1):
                scenes[env] = rng.integers(0, 9, size=(6, 6))
            if rng.random() < 0.03:
                stacks[env] = 0
            if rng.random() < 0.8:
                frame = scenes[env].copy()
                frame[rng.integers(6), rng.integers(6)] = 99
                stacks[env] = np.concatenate([stacks[env, 1:], frame[None]])
        yield Transition(before, stacks.copy(), rng.integers(0, 5, (N_ENVS, 1)), rng.normal(size=N_ENVS),
                         rng.random(N_ENVS) < 0.1, [{}] * N_ENVS)  # fmt: skip


def given(observations: np.ndarray, source: str, device: str) -> Any:
    return th.tensor(observations, device=device) if source == "device" else observations.copy()


@pytest.mark.parametrize("source", ["host", "device"])
@pytest.mark.parametrize(("method", "group"), [("delta", 1), ("delta", 4), ("rle", 1), ("zstd", 1)])
def test_rollouts(method: str, group: int, source: str, device: str) -> None:
    options = {"compression_kwargs": {"frames_per_record": group}} if group > 1 else {}
    plain, ours = rollout_pair(
        SPACE, device, n_envs=N_ENVS, slots=7, compression_method=method, frame_stack=4, **options
    )
    steps = history(0)
    for rollout in range(80):
        for buffer in (plain, ours):
            buffer.reset()
        for transition in itertools.islice(steps, 7):
            rest = transition.action, transition.reward, transition.done, th.zeros(N_ENVS), th.zeros(N_ENVS)
            plain.add(transition.obs, *rest)
            ours.add(given(transition.obs, source, device), *rest)
        ours.check_device()
        batches = []
        for buffer in (plain, ours):
            np.random.seed(rollout)
            batches.append(tuple(buffer.get()))
        assert_same(*batches[::-1])
        ours.check_device()


@pytest.mark.parametrize("source", ["host", "device", "both"])
@pytest.mark.parametrize(("method", "group"), [("delta", 1), ("delta", 4), ("rle", 1), ("zstd", 1), ("none", 1)])
def test_replay(method: str, group: int, source: str, device: str) -> None:
    options = {"compression_kwargs": {"frames_per_record": group}} if group > 1 else {}
    plain, ours = replay_pair(
        SPACE, device, n_envs=N_ENVS, slots=30, compression_method=method, frame_stack=4, **options
    )
    rng = np.random.default_rng(1)
    for step, transition in enumerate(itertools.islice(history(1), 700)):
        obs, next_obs, *rest = transition
        plain.add(obs.copy(), next_obs.copy(), *rest)
        where = source if source != "both" else ("host", "device")[step // 20 % 2]
        ours.add(given(obs, where, device), given(next_obs, where, device), *rest)
        if rng.random() < 0.15:
            ours.check_device()
            sample_both(plain, ours, batch_size=25, seed=step)
            ours.check_device()


class TestChecking:
    """What is planted on the device, or in the host's accounts, is found."""

    def filled(self, device: str, source: str = "host") -> Any:
        _, ours = replay_pair(SPACE, device, n_envs=N_ENVS, slots=30, compression_method="delta", frame_stack=4)
        for obs, next_obs, *rest in itertools.islice(history(2), 90):
            ours.add(given(obs, source, device), given(next_obs, source, device), *rest)
        ours.sample(8)
        ours.check_device()
        return ours

    def plant(self, frames: Any, fault: str) -> None:
        place = int(frames.first_records[0]) % frames.starts.shape[1]
        encoded = np.flatnonzero(frames.lengths[0] != frames.codec.record_bytes)
        live = np.arange(frames.first_records[0], frames.encoded[0]) % frames.starts.shape[1]
        delta = int(np.intersect1d(encoded, live)[0])
        if fault == "index on the device":
            frames.copy.records[0, place, 0] += 1
        elif fault == "length on the device":
            frames.copy.records[0, place, 1] += 1
        elif fault == "reference frame on the device":
            frames.copy.table[int(frames.codec.current[0]), 2] += 1
        elif fault == "reference released once too often":
            frames.codec.release(frames.codec.current[:1])
        elif fault == "reference taken once too often":
            frames.codec.take_references(frames.codec.current[:1])
        elif fault == "record in the heap":
            start = int(frames.starts[0, delta])
            frames.arena.heap[start : start + 3] = 255
        elif fault == "records that overlap":
            frames.starts[0, place] = frames.starts[1, int(frames.first_records[1]) % frames.starts.shape[1]]
        elif fault == "record outside":
            frames.starts[0, place] = frames.arena.limit + 5
        elif fault == "numbers of frames":
            frames.encoded[0] = frames.heads[0] + 1

    @pytest.mark.parametrize("source", ["host", "device"])
    @pytest.mark.parametrize(
        "fault",
        [
            "index on the device", "length on the device", "reference frame on the device",
            "reference released once too often", "reference taken once too often", "record in the heap",
            "records that overlap", "record outside", "numbers of frames",
        ],
    )  # fmt: skip
    def test_faults_are_found(self, fault: str, source: str, device: str) -> None:
        if source == "device" and fault == "reference frame on the device":
            pytest.skip("known to the device alone")
        ours = self.filled(device, source)
        self.plant(ours._stores[""].frames, fault)
        with pytest.raises(CorruptDataError):
            ours.check_device()

    def test_where_observations_end(self, device: str) -> None:
        ours = self.filled(device)
        ours._stores[""]._ends_copies[1][3, 1] += 1
        with pytest.raises(CorruptDataError, match="column 1"):
            ours.check_device()

    def test_fields(self, device: str) -> None:
        ours = self.filled(device)
        ours._fields.copy[3, 1] += 1
        with pytest.raises(CorruptDataError, match="rewards"):
            ours.check_device()


class TestGrowth:
    def test_a_ring_that_is_wrapped_grows_in_pieces(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_arena, "_MOVED_AT_ONCE", 1000)
        arena = DeviceArena(th.device(device), HeapBudget(None), slack=16)
        rng = np.random.default_rng(0)
        arena.grow(200_000)
        blocks: dict[int, np.ndarray] = {}
        for _ in range(60):
            start = arena.allocate(3_000)
            assert start is not None
            blocks[start] = rng.integers(0, 256, size=3_000, dtype=np.uint8)
            arena.write(start, blocks[start])
        for start in sorted(blocks)[:30]:
            del blocks[start]
        arena.free_until(min(blocks))
        while (start := arena.allocate(3_000)) is not None:
            blocks[start] = rng.integers(0, 256, size=3_000, dtype=np.uint8)
            arena.write(start, blocks[start])
        assert arena.wrap is not None
        arena._heap.resize(len(arena._heap) + 100_000)  # so that there is room to move to, and no new memory
        boundary, shift = arena.grow(3_000)
        assert shift
        data = arena.data
        for start, block in blocks.items():
            at = start + shift if start >= boundary else start
            assert data[at : at + 3_000].tobytes() == block.tobytes()

    @pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")
    def test_memory_that_was_outgrown_is_given_back_cuda(self) -> None:
        th.cuda.empty_cache()
        before = th.cuda.memory_reserved()
        space = spaces.Box(0, 255, (1, 512, 512), np.uint8)
        _, ours = replay_pair(space, "cuda", n_envs=1, slots=800, compression_method="delta", frame_stack=1)
        rng = np.random.default_rng(0)
        obs = rng.integers(0, 256, size=(1, 1, 512, 512), dtype=np.uint8)
        for step in range(800):
            next_obs = rng.integers(0, 256, size=(1, 1, 512, 512), dtype=np.uint8)
            ours.add(obs, next_obs, np.zeros(1), np.zeros(1), np.zeros(1), [{}])
            obs = next_obs
            if step % 50 == 0:
                ours.sample(4)
        assert th.cuda.memory_reserved() - before < 1.5 * ours.device_bytes + (64 << 20)
