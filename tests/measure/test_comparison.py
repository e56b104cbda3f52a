"""Buffers are compared in the state in which training has them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_extra_buffers.measure import comparison
from sb3_extra_buffers.measure.buffers import Task
from sb3_extra_buffers.measure.comparison import Memory, fill, measure_memory
from sb3_extra_buffers.measure.processes import run_in_fresh_process
from sb3_extra_buffers.measure.transitions import Transition, TransitionFile, collect
from tests.environments import SpaceEnv


@pytest.mark.parametrize("kind", ["Replay", "Rollout"])
def test_speed_is_measured_with_full_buffers(
    kind: Literal["Replay", "Rollout"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, actions = spaces.Box(-1, 1, (5,), np.float32), spaces.Discrete(3)
    env = DummyVecEnv([lambda: SpaceEnv(space, actions)] * 2)
    data = TransitionFile.write(tmp_path / "transitions", env, collect(env, 30, seed=1))
    timed: list[Any] = []
    time_buffers = comparison.time_buffers

    def spy(task: Task, buffers: dict[str, Any], *arguments: Any) -> Any:
        timed.extend(buffers.values())
        assert all(buffer.full for buffer in timed)
        return time_buffers(task, buffers, *arguments)

    monkeypatch.setattr(comparison, "time_buffers", spy)
    comparison.compare(Task(kind, space, actions, 2), data, ["auto"], buffer_size=40, batch_size=8, repeats=2)
    assert [type(buffer).__name__ for buffer in timed] == [f"{kind}Buffer", f"Compressed{kind}Buffer"]


FRAME = spaces.Box(0, 255, (1, 84, 84), np.uint8)


def noise(n_envs: int) -> Iterator[Transition]:
    """Endless steps that no codec compresses, so that ``auto`` tries all of them."""
    rng = np.random.default_rng(0)
    obs = rng.integers(0, 256, (n_envs, *FRAME.shape), dtype=np.uint8)
    while True:
        next_obs = rng.integers(0, 256, obs.shape, dtype=np.uint8)
        action, zeros = np.zeros((n_envs, 1), np.int64), np.zeros(n_envs, np.float32)
        yield Transition(obs, next_obs, action, zeros, zeros, [{}] * n_envs)
        obs = next_obs


def test_memory_of_the_methods_that_auto_tries_is_not_extrapolated(tmp_path: Path) -> None:
    task = Task("Replay", FRAME, spaces.Discrete(2), 4)
    env = DummyVecEnv([lambda: SpaceEnv(FRAME, spaces.Discrete(2))] * 4)
    data = TransitionFile.write(tmp_path / "transitions", env, islice(noise(4), 2_000))  # in the middle of a trial
    memory = run_in_fresh_process(measure_memory, "auto", task, data, 100_000)
    assert memory.bytes_per_transition < 1.1 * 84 * 84
    assert memory.measured < 1.1 * 8_000 * 84 * 84
    needed = memory.points[-1].settled_after
    assert f"use --steps {needed} or more" in memory.hint
    longer = Memory("auto", fill(task, task.make("auto", 100_000), noise(4), needed))
    assert longer.hint == ""


def test_rollouts_are_complete_when_auto_has_settled() -> None:
    task = Task("Rollout", FRAME, spaces.Discrete(2), 1)
    points = fill(task, task.make("auto", 1_000), noise(1), 1_000)
    assert points[-1].settled_after == 6_000  # the last trial may last until step 5,738
