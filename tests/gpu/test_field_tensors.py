"""Actions, rewards and the like that are tensors on the device stay there, and mean the same as arrays."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer

SPACE, ACTIONS, N_ENVS, SIZE = spaces.Box(0, 255, (2, 5, 6), np.uint8), spaces.Discrete(4), 3, 7
FIELDS = ("actions", "rewards", "dones", "timeouts")


def steps(n: int) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (n + 1, N_ENVS, *SPACE.shape), dtype=np.uint8)
    return [
        (
            frames[i],
            frames[i + 1],
            rng.integers(0, 4, N_ENVS),
            rng.normal(size=N_ENVS).astype(np.float32),
            rng.random(N_ENVS) < 0.4,
            rng.random(N_ENVS) < 0.4,
        )
        for i in range(n)
    ]


def add(buffer: GpuReplayBuffer, step: tuple[Any, ...], device: str | None) -> None:
    if device is not None:
        step = tuple(th.as_tensor(part, device=device) for part in step)
    *fields, timeouts = step
    infos = [{"TimeLimit.truncated": one} for one in timeouts] if device is None else {"TimeLimit.truncated": timeouts}
    buffer.add(*fields, infos)


@pytest.mark.slow
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("pattern", ["d", "dh", "ddh", "hd", "hhhhddddd"])
def test_same_batches_as_from_arrays(device: str, pattern: str) -> None:
    """Also when steps from the host and from the device alternate, and the buffer starts again."""
    ours, other = (
        GpuReplayBuffer(SIZE * N_ENVS, SPACE, ACTIONS, device=device, n_envs=N_ENVS, frame_stack=None) for _ in range(2)
    )
    for i, step in enumerate(steps(2 * SIZE + 3)):
        add(ours, step, device if pattern[i % len(pattern)] == "d" else None)
        add(other, step, None)
        np.random.seed(i)
        batch = ours.sample(8)
        np.random.seed(i)
        for part, expected in zip(batch, other.sample(8), strict=True):
            assert part is expected is None or th.equal(part, expected)
        if i == SIZE + 2:
            ours.check()
            assert np.array_equal(ours.rewards, other.rewards)
    for name in FIELDS:
        assert np.array_equal(getattr(ours, name), getattr(other, name))
    ours.check()
    copy = pickle.loads(pickle.dumps(ours))
    assert np.array_equal(copy.actions, other.actions)


@pytest.mark.usefixtures("either_way")
def test_written_arrays_count(device: str) -> None:
    """While a user holds an array, fields go to it, wherever they come from."""
    buffer = GpuReplayBuffer(SIZE * N_ENVS, SPACE, ACTIONS, device=device, n_envs=N_ENVS, frame_stack=None)
    some = steps(4)
    add(buffer, some[0], device)
    rewards = buffer.rewards
    rewards[0] = 7
    add(buffer, some[1], device)
    assert np.array_equal(rewards[1], some[1][3])
    del rewards
    add(buffer, some[2], device)
    assert buffer.rewards[:3].tolist() == [[7.0] * N_ENVS, some[1][3].tolist(), some[2][3].tolist()]
    buffer.rewards = np.full_like(buffer.rewards, 2)
    add(buffer, some[3], device)
    assert buffer.rewards[:4].tolist() == [*[[2.0] * N_ENVS] * 3, some[3][3].tolist()]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("pattern", ["d", "dh", "hdd"])
def test_same_rollouts_as_from_arrays(device: str, pattern: str) -> None:
    ours, other = (GpuRolloutBuffer(SIZE, SPACE, ACTIONS, device=device, n_envs=N_ENVS) for _ in range(2))
    for _ in range(2):
        ours.reset(), other.reset()
        for i, (obs, _, actions, rewards, starts, _) in enumerate(steps(SIZE)):
            values, log_probs = (th.as_tensor(rewards * factor, device=device) for factor in (2, 3))
            other.add(obs, actions, rewards, starts, values[:, None], log_probs)
            arrays = obs, actions, rewards, starts
            if pattern[i % len(pattern)] == "d":
                arrays = tuple(th.as_tensor(part, device=device) for part in arrays)
            ours.add(*arrays, values[:, None], log_probs)
            if i == 3:
                assert np.array_equal(ours.values, other.values)
        for buffer in (ours, other):
            buffer.compute_returns_and_advantage(values, np.array([True, False, True]))
        for name in ("actions", "rewards", "episode_starts", "values", "log_probs", "advantages", "returns"):
            assert np.array_equal(getattr(ours, name), getattr(other, name))
        np.random.seed(0)
        batches = list(ours.get(4))
        np.random.seed(0)
        for batch, expected in zip(batches, other.get(4), strict=True):
            assert all(map(th.equal, batch, expected))


@pytest.mark.usefixtures("either_way")
def test_wrong_fields_leave_nothing_behind(device: str) -> None:
    replay = GpuReplayBuffer(SIZE * N_ENVS, SPACE, ACTIONS, device=device, n_envs=N_ENVS, frame_stack=None)
    rollout = GpuRolloutBuffer(SIZE, SPACE, ACTIONS, device=device, n_envs=N_ENVS)
    (step,) = steps(1)
    wrong = (*step[:3], np.zeros(N_ENVS + 1, np.float32), *step[4:])
    with pytest.raises((ValueError, RuntimeError)):
        add(replay, wrong, device)
    obs, _, actions, rewards, starts, _ = (th.as_tensor(part, device=device) for part in wrong)
    with pytest.raises((ValueError, RuntimeError)):
        rollout.add(obs, actions, rewards, starts, starts.float(), starts.float())
    assert replay.pos == rollout.pos == 0
    replay.check()
