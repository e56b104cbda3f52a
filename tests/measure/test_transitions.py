"""Transitions read from a file are those that were written to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecTransposeImage

from sb3_extra_buffers.measure.transitions import TransitionFile, collect
from tests.environments import SpaceEnv

PICTURE = spaces.Box(0, 255, (8, 6, 3), np.uint8)
VECTOR = spaces.Box(-1, 1, (5,), np.float32)
N_ENVS, STEPS = 2, 45  # episodes end after 13 steps, and after 20


@pytest.mark.parametrize(
    "space", [PICTURE, VECTOR, spaces.Dict({"picture": PICTURE, "vector": VECTOR})], ids=["image", "vector", "dict"]
)
@pytest.mark.parametrize("actions", [spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)], ids=["discrete", "box"])
def test_values_and_memory_layout_survive(space: spaces.Space, actions: spaces.Space, tmp_path: Path) -> None:
    def make_env() -> DummyVecEnv:
        env = DummyVecEnv([lambda: SpaceEnv(space, actions)] * N_ENVS)
        env.seed(3)
        return env if space is VECTOR else VecTransposeImage(env)

    env = make_env()
    kept = TransitionFile.write(tmp_path / "transitions", env, collect(env, STEPS, seed=1))
    assert kept.transition_count == N_ENVS * STEPS
    ended = 0
    for real, read in zip(collect(make_env(), STEPS, seed=1), kept.read(), strict=True):
        for name in ("obs", "next_obs"):
            one, other = getattr(real, name), getattr(read, name)
            for key in one if isinstance(one, dict) else [...]:
                np.testing.assert_array_equal(one[key], other[key], strict=True)
                assert one[key].strides == other[key].strides
        np.testing.assert_array_equal(real.action, read.action, strict=True)
        np.testing.assert_array_equal(real.reward, read.reward, strict=True)
        np.testing.assert_array_equal(real.done, read.done)
        assert [info["TimeLimit.truncated"] for info in real.infos] == [i["TimeLimit.truncated"] for i in read.infos]
        ended += real.done.sum()
    assert ended > 2
    assert len(list(kept.read(7))) == 7
