"""Atari games with SB3's wrappers."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import gymnasium as gym
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecTransposeImage

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.errors import ConfigurationError


def make_env(
    env_id: str,
    n_envs: int,
    vec_env_cls: type[DummyVecEnv] | type[SubprocVecEnv] = SubprocVecEnv,
    framestack: int = 4,
    seed: int | None = None,
    **kwargs: Any,
) -> VecEnv:
    """Make ``n_envs`` copies of a game, with SB3's Atari wrappers and with channels first. Needs the extra ``atari``.

    :param env_id: Such as ``"PongNoFrameskip-v4"``.
    :param n_envs: Number of environments. A single one always runs in this process.
    :param vec_env_cls: By default, each environment runs in its own process.
    :param framestack: How many frames an observation stacks; 1 or less for none.
    :param seed: Seed of the first environment; the others use the following numbers.
    :param kwargs: Further arguments of :func:`~stable_baselines3.common.env_util.make_atari_env`, such as
        ``wrapper_kwargs``. All others are for ``gymnasium.make``, such as ``full_action_space``.
    """
    if n_envs < 1:
        raise ConfigurationError(f"n_envs must be at least 1, not {n_envs}.")
    require("ale_py", "Atari", "atari")
    require("cv2", "Atari", "atari")
    of_sb3 = {name: kwargs.pop(name) for name in inspect.signature(make_atari_env).parameters if name in kwargs}
    env: VecEnv = make_atari_env(
        functools.partial(_make_game, env_id),
        n_envs=n_envs,
        seed=seed,
        vec_env_cls=DummyVecEnv if n_envs == 1 else vec_env_cls,
        **{**of_sb3, "env_kwargs": {**(of_sb3.get("env_kwargs") or {}), **kwargs}},
    )
    if framestack > 1:
        env = VecFrameStack(env, n_stack=framestack)
    return VecTransposeImage(env)


def _make_game(env_id: str, **kwargs: Any) -> gym.Env[Any, Any]:
    # Importing ale_py registers the games. A worker process that was spawned, not forked, must do this again.
    require("ale_py", "Atari", "atari")
    kwargs.setdefault("render_mode", "rgb_array")
    return gym.make(env_id, **kwargs)
