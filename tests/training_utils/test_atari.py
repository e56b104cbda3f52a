"""Atari environments."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecFrameStack,
    VecTransposeImage,
    is_vecenv_wrapped,
)

from sb3_extra_buffers.errors import ConfigurationError, MissingPackageError
from sb3_extra_buffers.training_utils.atari import make_env

pytest.importorskip("ale_py")
PONG = "PongNoFrameskip-v4"


@pytest.mark.parametrize("framestack", [0, 1, 2, 4])
def test_observations_have_their_frames_first(framestack: int) -> None:
    env = make_env(PONG, 1, framestack=framestack, seed=0)
    assert env.observation_space.shape == (max(framestack, 1), 84, 84)
    assert is_vecenv_wrapped(env, VecTransposeImage)
    assert is_vecenv_wrapped(env, VecFrameStack) == (framestack > 1)
    assert isinstance(env.unwrapped, DummyVecEnv)
    assert env.env_is_wrapped(AtariWrapper) == env.env_is_wrapped(Monitor) == [True]
    obs = env.reset()
    assert isinstance(obs, np.ndarray)
    assert (obs.shape, obs.dtype) == ((1, *env.observation_space.shape), np.uint8)
    env.close()


def test_several_environments_have_processes_and_seeds_of_their_own() -> None:
    # Forked, because that is quick; by default SB3 starts its workers anew.
    env = make_env(PONG, 2, seed=5, vec_env_kwargs={"start_method": "fork"}, wrapper_kwargs={"noop_max": 7})
    same = make_env(PONG, 2, DummyVecEnv, seed=5, wrapper_kwargs={"noop_max": 7})
    assert isinstance(env.unwrapped, SubprocVecEnv)
    first, second = env.reset(), same.reset()
    np.testing.assert_array_equal(first, second)
    for _ in range(3):
        one, two = env.step(np.array([2, 3])), same.step(np.array([2, 3]))
        np.testing.assert_array_equal(one[0], two[0])
    env.close()


def test_arguments_for_the_game_and_for_the_wrappers() -> None:
    env = make_env(PONG, 1, full_action_space=True, env_kwargs={"mode": 0}, wrapper_kwargs={"screen_size": 42})
    assert (env.action_space.n, env.observation_space.shape) == (18, (4, 42, 42))  # type: ignore[attr-defined]
    env.close()


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("ale_py", "cv2"):
        with monkeypatch.context() as missing:
            missing.setitem(sys.modules, package, None)
            with pytest.raises(MissingPackageError, match=r"sb3-extra-buffers\[atari\]"):
                make_env(PONG, 1)


def test_mistakes_are_errors() -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        make_env(PONG, 0)
    unknown: dict[str, Any] = {"no_such_argument": 1}
    with pytest.raises(TypeError, match="no_such_argument"):
        make_env(PONG, 1, **unknown)
