"""Collect transitions of an environment, and keep them in a file, so that every buffer stores the same data."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from sb3_extra_buffers.compressed.rows import map_parts
from sb3_extra_buffers.measure.policies import RandomPolicy
from sb3_extra_buffers.training_utils.collection import Collector
from sb3_extra_buffers.training_utils.collection import Transition as Transition


def collect(env: VecEnv, steps: int, seed: int = 0, policy: Any = None) -> Iterator[Transition]:
    """Yield ``steps`` steps of all environments, as SB3 adds them to a replay buffer.

    :param policy: Any object with the ``predict`` method of an SB3 model; by default, random actions.
    """
    collector = Collector(env, policy or RandomPolicy(env.action_space, env.num_envs, seed), deterministic=False)
    for _ in range(steps):
        yield collector.step()


@dataclass(frozen=True)
class TransitionFile:
    """A file with ``steps`` steps of ``n_envs`` environments.

    It is read step by step, so that the data takes hardly any memory where buffers are measured.
    """

    path: Path
    steps: int
    n_envs: int
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]

    @property
    def transition_count(self) -> int:
        return self.steps * self.n_envs

    @classmethod
    def write(cls, path: Path, env: VecEnv, transitions: Iterable[Transition]) -> TransitionFile:
        """Write transitions of ``env``. ``obs`` is written only after a reset: else it is the last ``next_obs``."""
        steps, is_reset = 0, True
        with gzip.open(path, "wb", compresslevel=1) as file:
            for obs, next_obs, action, reward, done, infos in transitions:
                truncated = [info.get("TimeLimit.truncated", False) for info in infos]
                packed_obs = _packed(obs) if is_reset else None
                pickle.dump((packed_obs, _packed(next_obs), action, reward, done, truncated), file)
                steps, is_reset = steps + 1, bool(np.any(done))
        return cls(path, steps, env.num_envs, env.observation_space, env.action_space)

    def read(self, steps: int | None = None) -> Iterator[Transition]:
        """Yield all transitions, or the first ``steps``, with the same values and memory layout.

        ``infos`` has only the key that buffers read, ``TimeLimit.truncated``.
        """
        next_obs: Any = None
        with gzip.open(self.path, "rb") as file:
            for _ in range(self.steps if steps is None else min(steps, self.steps)):
                packed_obs, packed_next_obs, action, reward, done, truncated = pickle.load(file)
                obs = next_obs if packed_obs is None else _unpacked(packed_obs)
                next_obs = _unpacked(packed_next_obs)
                infos = [{"TimeLimit.truncated": bool(flag)} for flag in truncated]
                yield Transition(obs, next_obs, action, reward, done, infos)


def _packed(observations: Any) -> Any:
    """Make arrays C-contiguous and keep the order of their axes: pickle would lose the strides of transposed images."""

    def packed(array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        axes = np.argsort([-stride for stride in array.strides], kind="stable")
        return np.ascontiguousarray(array.transpose(axes)), np.argsort(axes)

    return map_parts(packed, observations)


def _unpacked(packed: Any) -> Any:
    return map_parts(lambda part: part[0].transpose(part[1]), packed)
