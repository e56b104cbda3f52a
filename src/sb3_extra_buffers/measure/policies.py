"""Policies that play an environment: random actions, or a model that SB3 saved."""

from __future__ import annotations

import json
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.measure.environments import describe

ALGORITHMS = {
    name.lower(): (package, name)
    for package, names in {
        "stable_baselines3": ("A2C", "DDPG", "DQN", "PPO", "SAC", "TD3"),
        "sb3_contrib": ("ARS", "CrossQ", "MaskablePPO", "QRDQN", "RecurrentPPO", "TQC", "TRPO"),
    }.items()
    for name in names
}
_ACTOR_CRITICS = {"clip_range": "ppo", "cg_max_steps": "trpo", "rms_prop_eps": "a2c", "ent_coef": "a2c"}
"""A setting that only this algorithm has, among those that share SB3's ``ActorCriticPolicy``."""


class RandomPolicy:
    """Samples actions uniformly. It has the ``predict`` of an SB3 model."""

    def __init__(self, space: spaces.Space[Any], n_envs: int, seed: int) -> None:
        self.space = space
        self.n_envs = n_envs
        self._rng = np.random.default_rng(seed)
        space.seed(seed)

    def predict(self, observation: Any, **kwargs: Any) -> tuple[npt.NDArray[Any], None]:
        if isinstance(self.space, spaces.Discrete):
            return self._rng.integers(self.space.n, size=self.n_envs) + self.space.start, None
        return np.stack([self.space.sample() for _ in range(self.n_envs)]), None


def load_policy(path: Path, env: VecEnv, algorithm: str | None = None) -> BaseAlgorithm:
    """Load a model to play ``env``, without allocating the buffer that it trained with.

    :param algorithm: Such as ``"dqn"``; by default read from the file.
    """
    name = (algorithm or guess_algorithm(path)).lower()
    if name not in ALGORITHMS:
        raise ConfigurationError(f"Unknown algorithm {algorithm!r}. The known ones are {', '.join(ALGORITHMS)}.")
    package, class_name = ALGORITHMS[name]
    require(package, f"A model of {class_name}", "contrib")
    model_class: type[BaseAlgorithm] = getattr(import_module(package), class_name)
    no_buffer: dict[str, Any] = {
        "buffer_size": 1,
        "replay_buffer_class": None,
        "replay_buffer_kwargs": {},
        "rollout_buffer_class": None,
    }
    try:
        model = model_class.load(path, device="cpu", custom_objects=no_buffer)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"The model {str(path)!r} cannot be loaded as {class_name}: {reason}. Name its algorithm with --algo."
        ) from error
    for name in ("observation_space", "action_space"):
        ours, theirs = getattr(env, name), getattr(model, name)
        if ours != theirs:
            raise ConfigurationError(
                f"The model {str(path)!r} was trained with the {name.replace('_', ' ')} {describe(theirs)}, but the "
                f"environment has {describe(ours)}. Use the environment and the --frame-stack of its training."
            )
    return model


def guess_algorithm(path: Path) -> str:
    """Find the algorithm that saved a model by the policy class and the settings in the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            data = json.loads(archive.read("data"))
        module: str = data["policy_class"]["__module__"]
    except (OSError, KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise ConfigurationError(f"{str(path)!r} is not a model saved by SB3. Pass the .zip of one.") from error
    for name in ALGORITHMS:
        if module.split(".")[1:2] == [name]:  # such as stable_baselines3.dqn.policies
            return name
    if ".maskable." in module or ".recurrent." in module:
        return "maskableppo" if ".maskable." in module else "recurrentppo"
    for setting, name in _ACTOR_CRITICS.items():
        if setting in data:
            return name
    raise ConfigurationError(f"{str(path)!r} does not say which algorithm saved it. Name it with --algo.")
