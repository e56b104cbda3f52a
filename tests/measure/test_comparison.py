"""Buffers are compared in the state in which training has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_extra_buffers.measure import comparison
from sb3_extra_buffers.measure.buffers import Task
from sb3_extra_buffers.measure.transitions import TransitionFile, collect
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
