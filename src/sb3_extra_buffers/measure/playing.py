"""Playing an environment, at random or with a trained model."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.measure.environments import describe
from sb3_extra_buffers.training_utils.collection import Player

ALGORITHMS = {
    name.lower(): (package, name)
    for package, names in {
        "stable_baselines3": ("A2C", "DDPG", "DQN", "PPO", "SAC", "TD3"),
        "sb3_contrib": ("ARS", "CrossQ", "MaskablePPO", "QRDQN", "RecurrentPPO", "TQC", "TRPO"),
    }.items()
    for name in names
}


class Transition(NamedTuple):
    """The arguments of ``ReplayBuffer.add``, one row per environment; observations are arrays, or dicts of arrays."""

    obs: Any
    next_obs: Any
    action: npt.NDArray[Any]
    reward: npt.NDArray[Any]
    done: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]


class Policy(Protocol):
    """What SB3's models have, too."""

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[npt.NDArray[Any], Any]: ...


class RandomPolicy:
    """Draws every action alike."""

    def __init__(self, space: spaces.Space[Any], n_envs: int, seed: int) -> None:
        self.space = space
        self.n_envs = n_envs
        self._rng = np.random.default_rng(seed)
        space.seed(seed)

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[npt.NDArray[Any], Any]:
        if isinstance(self.space, spaces.Discrete):
            return self._rng.integers(self.space.n, size=self.n_envs) + self.space.start, None
        return np.stack([self.space.sample() for _ in range(self.n_envs)]), None


def play(env: VecEnv, steps: int, seed: int = 0, policy: Policy | None = None) -> Iterator[Transition]:
    """Yield what SB3 stores, ``steps`` times: ``next_obs`` is the last observation where an episode ends."""
    player = Player(env, policy or RandomPolicy(env.action_space, env.num_envs, seed), deterministic=False)
    for _ in range(steps):
        step = player.step()
        yield Transition(step.obs, step.next_obs, step.actions, step.rewards, step.dones, step.infos)


def load_policy(path: Path, env: VecEnv, algorithm: str | None = None) -> BaseAlgorithm:
    """Load a model that is to play ``env``, without the memory that it would need to train.

    :param algorithm: Such as ``"dqn"``; by default found out from the file.
    """
    name = (algorithm or guess_algorithm(path)).lower()
    if name not in ALGORITHMS:
        raise ConfigurationError(f"Unknown algorithm {algorithm!r}. The known ones are {', '.join(ALGORITHMS)}.")
    package, class_name = ALGORITHMS[name]
    require(package, f"A model of {class_name}", "contrib")
    model_class: type[BaseAlgorithm] = getattr(import_module(package), class_name)
    small: dict[str, Any] = {
        "buffer_size": 1,
        "replay_buffer_class": None,
        "replay_buffer_kwargs": {},
        "rollout_buffer_class": None,
    }
    try:
        model = model_class.load(path, device="cpu", custom_objects=small)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"The model {str(path)!r} cannot be loaded as {class_name}: {reason}. Name its algorithm with --algo."
        ) from error
    for what in ("observation_space", "action_space"):
        ours, theirs = getattr(env, what), getattr(model, what)
        if ours != theirs:
            raise ConfigurationError(
                f"The model {str(path)!r} was trained with the {what.replace('_', ' ')} {describe(theirs)}, but the "
                f"environment has {describe(ours)}. Choose the one that it was trained in, and its --frame-stack."
            )
    return model


def guess_algorithm(path: Path) -> str:
    """The algorithm that saved a model, told by the policy and the settings that the file names."""
    try:
        with zipfile.ZipFile(path) as archive:
            data = json.loads(archive.read("data"))
        module: str = data["policy_class"]["__module__"]
    except (OSError, KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise ConfigurationError(f"{str(path)!r} is not a model that SB3 has saved. Give the .zip of one.") from error
    for name in ALGORITHMS:
        if module.split(".")[1:2] == [name]:  # such as stable_baselines3.dqn.policies
            return name
    if ".maskable." in module:
        return "maskableppo"
    if ".recurrent." in module:
        return "recurrentppo"
    if "clip_range" in data:
        return "ppo"
    if "cg_max_steps" in data:
        return "trpo"
    if "rms_prop_eps" in data or "ent_coef" in data:
        return "a2c"
    raise ConfigurationError(f"It is not clear which algorithm saved {str(path)!r}. Name it with --algo.")
