"""Make environments from a Gymnasium id, wrapped as SB3 wraps them."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack

from sb3_extra_buffers.codecs.availability import is_installed, require
from sb3_extra_buffers.errors import ConfigurationError, EnvironmentMakeError, ExtraBuffersError
from sb3_extra_buffers.training_utils import atari

ATARI_STACK = 4
SUPPORTED_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""The types of spaces that SB3 supports for actions and, together with Dict, for observations."""

Wrapper = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]


def make_env(
    env_id: str,
    n_envs: int,
    seed: int,
    frame_stack: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    wrapper: str | None = None,
) -> VecEnv:
    """Make ``n_envs`` copies of an environment, all in this process.

    Atari games get SB3's wrappers and stacks of four frames, unless ``wrapper`` is given. Images are transposed to
    channels first, as in SB3's algorithms.

    :param env_id: A Gymnasium id, such as ``"CartPole-v1"``, or ``"module:id"`` if ``module`` registers it.
    :param frame_stack: Frames per observation; 1 for no stacking. By default 4 for Atari, else 1.
    :param env_kwargs: Arguments for ``gymnasium.make``.
    :param wrapper: A wrapper class, as ``"module:Class"``.
    """
    wrap = None if wrapper is None else _wrapper_class(wrapper)
    kwargs = dict(env_kwargs or {})
    try:
        if is_atari(env_id) and wrap is None:
            stack = frame_stack or ATARI_STACK
            return atari.make_env(env_id, n_envs, DummyVecEnv, framestack=stack, seed=seed, env_kwargs=kwargs)
        make_one = functools.partial(_make_one, env_id, wrap, **kwargs)
        env: VecEnv = make_vec_env(make_one, n_envs, seed=seed, vec_env_cls=DummyVecEnv)
        if frame_stack is not None and frame_stack > 1:
            env = VecFrameStack(env, frame_stack)
    except ExtraBuffersError:
        raise
    except Exception as error:  # an environment may raise anything
        raise EnvironmentMakeError(_describe_failure(env_id, error)) from error
    return BaseAlgorithm._wrap_env(env, verbose=0, monitor_wrapper=False)


def is_atari(env_id: str) -> bool:
    """Whether the environment is registered by ``ale_py``, the Arcade Learning Environment."""
    if is_installed("ale_py"):
        ale_py = importlib.import_module("ale_py")  # registers its games
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner between the progress bars
    elif env_id.startswith("ALE/") or "NoFrameskip-v" in env_id:
        require("ale_py", f"The environment {env_id!r}", "atari")
    spec = gym.registry.get(env_id)
    return spec is not None and isinstance(spec.entry_point, str) and spec.entry_point.startswith("ale_py")


def describe(space: spaces.Space[Any]) -> str:
    """Dtype and shape, such as ``uint8 (4, 84, 84)``; for a Dict, one for each key."""
    if isinstance(space, spaces.Dict):
        return ", ".join(f"{key}: {describe(part)}" for key, part in space.spaces.items())
    return f"{space.dtype} {space.shape}" if space.shape is not None else repr(space)


def _make_one(env_id: str, wrap: Wrapper | None, **kwargs: Any) -> gym.Env[Any, Any]:
    env = gym.make(env_id, **kwargs)
    if wrap is not None:
        env = wrap(env)
    if problem := _unsupported(env.observation_space, env.action_space):
        env.close()
        raise EnvironmentMakeError(
            f"The {problem} in {env_id!r}. Pass a wrapper that removes or converts them: --wrapper module:Class."
        )
    return env


def _unsupported(observations: spaces.Space[Any], actions: spaces.Space[Any]) -> str | None:
    """Which of these spaces SB3 does not support, for an error message."""
    if isinstance(observations, spaces.Dict):
        parts = observations.spaces.items()
        if wrong := [f"{key} ({_kind(part)})" for key, part in parts if not _can_be_observed(part)]:
            return f"observations have keys that SB3 does not support: {', '.join(wrong)}"
    elif not _can_be_observed(observations):
        return f"observations have a type that SB3 does not support: {_kind(observations)}"
    has_rows = isinstance(actions, spaces.MultiBinary) and len(actions.shape) > 1
    if has_rows or not isinstance(actions, SUPPORTED_SPACES):
        return f"actions have a type that SB3 does not support: {_kind(actions)}"
    return None


def _can_be_observed(space: spaces.Space[Any]) -> bool:
    """Whether SB3 supports observations of this space. It needs an axis besides that of the environments."""
    return isinstance(space, SUPPORTED_SPACES) and not (isinstance(space, spaces.Box) and space.shape == ())


def _kind(space: spaces.Space[Any]) -> str:
    shaped = isinstance(space, spaces.Box | spaces.MultiBinary)
    return type(space).__name__ + (f" of shape {space.shape}" if shaped else "")


def _wrapper_class(path: str) -> Wrapper:
    module, _, name = path.partition(":")
    try:
        wrap: Wrapper = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"There is no wrapper {path!r}: {error}. Pass 'module:Class', such as "
            "gymnasium.wrappers:FlattenObservation."
        ) from error
    return wrap


def _describe_failure(env_id: str, error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, gym.error.UnregisteredEnv):
        package = re.split(r"[-/]", env_id)[0].lower()  # many environments have the name of their package
        known = package if package.isidentifier() and is_installed(package) else "module"
        return (
            f"There is no environment {env_id!r}: {reason} If a module must be imported to register it, "
            f"add the module: --env {known}:{env_id.rpartition(':')[2]}"
        )
    if isinstance(error, ModuleNotFoundError):
        return (
            f"The environment {env_id!r} needs a package that is not installed: {reason.rstrip('.')}. Install it with "
            "pip. If it is a file, run the command in the folder of that file."
        )
    return f"The environment {env_id!r} cannot be made: {reason}"
