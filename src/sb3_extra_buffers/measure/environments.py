"""Make environments by their Gymnasium id, wrapped as SB3 wraps them."""

from __future__ import annotations

import importlib.util
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.errors import EnvironmentMakeError, ExtraBuffersError
from sb3_extra_buffers.training_utils import atari

ATARI_STACK = 4


def make_env(env_id: str, n_envs: int, seed: int, frame_stack: int | None = None) -> VecEnv:
    """Make ``n_envs`` copies of an environment, all in this process.

    Atari games get SB3's wrappers and stacks of four frames. Images of other environments become channels first, as in
    SB3's algorithms. ``frame_stack`` sets the number of stacked frames; ``1`` stacks none.
    """
    try:
        if is_atari(env_id):
            return atari.make_env(
                env_id, n_envs, vec_env_cls=DummyVecEnv, framestack=frame_stack or ATARI_STACK, seed=seed
            )
        env: VecEnv = make_vec_env(env_id, n_envs, seed=seed, vec_env_cls=DummyVecEnv)
        if frame_stack is not None and frame_stack > 1:
            env = VecFrameStack(env, frame_stack)
    except ExtraBuffersError:
        raise
    except Exception as error:  # an environment may raise anything
        raise EnvironmentMakeError(_why_not(env_id, error)) from error
    if isinstance(env.observation_space, spaces.Tuple):
        env.close()
        raise EnvironmentMakeError(
            f"The environment {env_id!r} has observations of type Tuple, which SB3 does not support. "
            "Wrap it so that they are a Dict or a Box."
        )
    return BaseAlgorithm._wrap_env(env, verbose=0, monitor_wrapper=False)


def is_atari(env_id: str) -> bool:
    """Whether the environment is registered by ``ale_py``, the Arcade Learning Environment."""
    if importlib.util.find_spec("ale_py") is not None:
        ale_py = importlib.import_module("ale_py")  # which registers its games
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner between the progress bars
    elif env_id.startswith("ALE/") or "NoFrameskip-v" in env_id:
        require("ale_py", f"The environment {env_id!r}", "atari")
    spec = gym.registry.get(env_id)
    return spec is not None and isinstance(spec.entry_point, str) and spec.entry_point.startswith("ale_py")


def _why_not(env_id: str, error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, gym.error.UnregisteredEnv):
        return (
            f"There is no environment {env_id!r}: {reason} "
            "If another package registers it, write 'package:id'. gymnasium.pprint_registry() lists all others."
        )
    if isinstance(error, ModuleNotFoundError):
        return f"The environment {env_id!r} needs a package that is not installed: {reason}. Install it with pip."
    return f"The environment {env_id!r} cannot be made: {reason}"


def describe(space: spaces.Space[Any]) -> str:
    """Dtype and shape, ``uint8 (4, 84, 84)``; for a Dict, those of each key."""
    if isinstance(space, spaces.Dict):
        return ", ".join(f"{key}: {describe(part)}" for key, part in space.spaces.items())
    return f"{space.dtype} {space.shape}" if space.shape is not None else repr(space)
