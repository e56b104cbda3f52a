"""Doom in colours and as masks."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.env_checker import check_env

from sb3_extra_buffers.errors import ConfigurationError, MissingPackageError

pytest.importorskip("vizdoom")
sys.path.append(str(Path(__file__).parents[2] / "examples"))

from doom import CLASSES, VizdoomEnv, make_env  # only found there


def test_colours_and_masks_are_of_the_same_moment() -> None:
    both, mask, spread = (
        VizdoomEnv("basic", view, resolution=(120, 160), spread=spread, render_mode="rgb_array")
        for view, spread in (("both", False), ("mask", False), ("mask", True))
    )
    assert both.action_space == spaces.Discrete(3)
    seen, (alone, _), (spread_out, _) = both.reset(seed=1)[0], mask.reset(seed=1), spread.reset(seed=1)
    for step in range(30):
        assert seen["rgb"].shape == (120, 160, 3)
        assert seen["mask"].shape == (120, 160, 1)
        np.testing.assert_array_equal(seen["mask"], alone)
        np.testing.assert_array_equal(np.where(alone < 255, alone * 20, alone), spread_out)
        np.testing.assert_array_equal(both.render(), seen["rgb"])
        assert set(np.unique(alone)) <= {0, 255, *range(1, len(CLASSES) + 1)}
        action = np.int64(step % 3)
        seen, _, ended, truncated, _ = both.step(action)
        alone, spread_out = mask.step(action)[0], spread.step(action)[0]
        if ended or truncated:
            break
    assert CLASSES.index("Monster") + 1 in alone
    for env in (both, mask, spread):
        env.close()


def test_it_is_a_proper_environment() -> None:
    env = VizdoomEnv("basic", "mask")
    check_env(env, warn=False)
    env.close()


def test_vectors_of_environments() -> None:
    env = make_env("basic", 2, view="rgb", framestack=3, seed=0)
    assert env.observation_space.shape == (9, 120, 160)
    obs = env.reset()
    assert isinstance(obs, np.ndarray)
    assert obs.shape == (2, 9, 120, 160)
    assert "terminal_observation" not in env.step(np.array([0, 1]))[3][0]
    env.close()


def test_mistakes_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="deathmatch"):
        VizdoomEnv("no-such")
    with pytest.raises(ConfigurationError, match="121 by 160"):
        VizdoomEnv("basic", resolution=(121, 160))
    with pytest.raises(ConfigurationError, match="'rgb', 'mask' or 'both'"):
        VizdoomEnv("basic", view="depth")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "vizdoom", None)
    with pytest.raises(MissingPackageError, match=r"sb3-extra-buffers\[vizdoom\]"):
        VizdoomEnv("basic")
