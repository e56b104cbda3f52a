"""Many rollouts one after the other, and replay buffers that are overwritten many times, are still exact."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, arena, frame_store
from sb3_extra_buffers.gpu_buffers import observation_store as gpu_observation_store
from sb3_extra_buffers.storage import observation_store
from tests.gpu.helpers import replay_pair, rollout_pair
from tests.transitions import Transition, assert_same, sample_both

SPACE = spaces.Box(0, 255, (2, 3, 3), np.uint8)
N_ENVS = 2
LONG = th.cuda.is_available()
"""On a GPU histories are ten times longer: Triton's interpreter takes its time."""
METHODS = [("delta", 1), ("delta", 3), ("rle", 1)]


def history(seed: int) -> Any:
    """Scenes that change, frames that repeat, episodes that begin with zeros, and environments that differ in it."""
    rng = np.random.default_rng(seed)
    scenes = rng.integers(0, 9, size=(N_ENVS, 3, 3), dtype=np.uint8)
    stacks = np.zeros((N_ENVS, *SPACE.shape), np.uint8)
    while True:
        before = stacks.copy()
        for env in range(N_ENVS):
            if rng.random() < 0.05 * (env + 1):
                scenes[env] = rng.integers(0, 9, size=(3, 3))
            if rng.random() < 0.03:
                stacks[env] = 0
            if rng.random() < 0.8:
                frame = scenes[env].copy()
                frame[rng.integers(3), rng.integers(3)] = 99
                stacks[env] = np.concatenate([stacks[env, 1:], frame[None]])
        yield Transition(before, stacks.copy(), rng.integers(0, 5, (N_ENVS, 1)), rng.normal(size=N_ENVS),
                         rng.random(N_ENVS) < 0.1, [{}] * N_ENVS)  # fmt: skip


def given(observations: np.ndarray, source: str, device: str) -> Any:
    return th.tensor(observations, device=device) if source == "device" else observations.copy()


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
class TestOnTheDevice:
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ring, index and arena that are full all the time."""
        monkeypatch.setattr(frame_store, "_RING_FRAMES", 0)
        monkeypatch.setattr(gpu_observation_store, "_FRAMES_PER_SLOT", 0)
        monkeypatch.setattr(arena, "_SMALLEST_STEP", 1 << 5)
        monkeypatch.setattr(observation_store, "_LAST_FRAME_NUMBER", 60)

    @pytest.mark.parametrize("source", ["host", "device"])
    @pytest.mark.parametrize(("method", "group"), METHODS)
    def test_rollouts(self, method: str, group: int, source: str, device: str) -> None:
        plain, ours = rollout_pair(SPACE, device, n_envs=N_ENVS, slots=5, **options_of(method, group))
        steps = history(0)
        for rollout in range(60 if LONG else 6):
            for buffer in (plain, ours):
                buffer.reset()
            for transition in itertools.islice(steps, 5):
                rest = transition.action, transition.reward, transition.done, th.zeros(N_ENVS), th.zeros(N_ENVS)
                plain.add(transition.obs, *rest)
                ours.add(given(transition.obs, source, device), *rest)
            ours.check()
            batches = []
            for buffer in (plain, ours):
                np.random.seed(rollout)
                batches.append(tuple(buffer.get()))
            assert_same(*batches[::-1])

    @pytest.mark.parametrize(("method", "group"), [*METHODS, ("none", 1)])
    def test_replay(self, method: str, group: int, device: str, tmp_path: Path, monkeypatch: Any) -> None:
        """With observations from both sides, resets, saves and loads."""
        monkeypatch.setattr("sb3_extra_buffers.gpu_buffers.observation_store.REVIEW_STEPS", 20)
        plain, ours = replay_pair(SPACE, device, n_envs=N_ENVS, slots=7, **options_of(method, group))
        for step, transition in enumerate(itertools.islice(history(1), 1000 if LONG else 90)):
            obs, next_obs, *rest = transition
            plain.add(obs.copy(), next_obs.copy(), *rest)
            where = ("host", "device")[step // 9 % 2]
            ours.add(given(obs, where, device), given(next_obs, where, device), *rest)
            if step % 30 == 17:
                ours.check()
                sample_both(plain, ours, batch_size=5, seed=step)
                ours.check_device()
            if step % 30 == 20:
                ours.save(tmp_path / "buffer")
                ours = GpuReplayBuffer.load(tmp_path / "buffer", device)
            if step % 80 == 50:
                for buffer in (plain, ours):
                    buffer.reset()
        if method != "none":
            frames = ours._stores[""].frames
            ours.check()
            assert (frames.heads < 90 * 2).all(), "renumbered"


@pytest.mark.parametrize("source", ["host", "device"])
@pytest.mark.parametrize(("method", "group"), [("delta", 1), ("delta", 4), ("rle", 1), ("zstd", 1), ("none", 1)])
def test_replay_in_host_memory(method: str, group: int, source: str, device: str) -> None:
    plain, ours = replay_pair(SPACE, device, n_envs=N_ENVS, slots=30, **options_of(method, group))
    rng = np.random.default_rng(1)
    for step, transition in enumerate(itertools.islice(history(1), 700)):
        obs, next_obs, *rest = transition
        plain.add(obs.copy(), next_obs.copy(), *rest)
        ours.add(given(obs, source, device), given(next_obs, source, device), *rest)
        if rng.random() < 0.15:
            ours.check_device()
            sample_both(plain, ours, batch_size=25, seed=step)


def options_of(method: str, group: int) -> dict[str, Any]:
    options = {"compression_kwargs": {"frames_per_record": group}} if method == "delta" else {}
    return {"compression_method": method, "frame_stack": 2, **options}


@pytest.mark.usefixtures("kernels")
class TestChecking:
    """What is planted on the device, or in the host's accounts, is found."""

    def filled(self, device: str) -> Any:
        _, ours = replay_pair(SPACE, device, n_envs=N_ENVS, slots=12, **options_of("delta", 1))
        for obs, next_obs, *rest in itertools.islice(history(2), 24):
            ours.add(obs, next_obs, *rest)
        ours.check_device()
        return ours

    def plant(self, frames: Any, fault: str) -> None:
        live = np.arange(frames.first_records[0], frames.encoded[0]) % frames.index.capacity
        place = int(live[0])
        encoded = [at for at in live if frames.index.lengths[0, at] != frames.codec.record_bytes]
        if fault == "index on the device":
            frames.tensors.records[0, place, 0] += 1
        elif fault == "length on the device":
            frames.tensors.records[0, place, 1] += 1
        elif fault == "frames on the device":
            frames.tensors.encoded[0] += 1
        elif fault == "reference released once too often":
            frames.codec.release(frames.codec._current[:1])
        elif fault == "reference counted once too often":
            frames.codec._uses.incref(frames.codec._current[:1])
        elif fault == "record in the heap":
            start = int(frames.index.starts[0, encoded[0]])
            frames.arena.heap[start : start + 3] = 255
        elif fault == "records that overlap":
            frames.index.starts[0, place] = frames.index.starts[1, int(frames.first_records[1]) % frames.index.capacity]
        elif fault == "record outside":
            frames.index.starts[0, place] = frames.arena.limit + 5
        elif fault == "numbers of frames":
            frames.encoded[0] = frames.heads[0] + 1

    @pytest.mark.parametrize(
        "fault",
        [
            "index on the device", "length on the device", "frames on the device",
            "reference released once too often", "reference counted once too often", "record in the heap",
            "records that overlap", "record outside", "numbers of frames",
        ],
    )  # fmt: skip
    def test_faults_are_found(self, fault: str, device: str) -> None:
        ours = self.filled(device)
        self.plant(ours._stores[""].frames, fault)
        with pytest.raises(CorruptDataError):
            ours.check_device()

    def test_the_arena_is_copied_once(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, copies, data = self.filled(device), [], arena.DeviceArena.data.fget
        monkeypatch.setattr(arena.DeviceArena, "data", property(lambda own: copies.append(own) or data(own)))
        ours.check()
        assert len(copies) == 1

    def test_where_observations_end(self, device: str) -> None:
        ours = self.filled(device)
        ours._stores[""].frames.ends[1][3, 1] += 1000
        with pytest.raises(CorruptDataError, match="column 1"):
            ours.check()

    def test_fields(self, device: str) -> None:
        ours = self.filled(device)
        ours.sample(2)
        ours._fields.copy[3, 1] += 1
        with pytest.raises(CorruptDataError, match="rewards"):
            ours.check_device()
