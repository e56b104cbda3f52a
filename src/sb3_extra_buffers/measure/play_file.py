"""A play, kept in a file and given to one buffer after the other.

It is read step by step, so that a process that measures memory hardly has any of its own for it.
"""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from sb3_extra_buffers.measure.playing import Transition

Array = npt.NDArray[Any]
_SINGLE = ""


@dataclass(frozen=True)
class PlayFile:
    """``steps`` steps of ``n_envs`` environments."""

    path: Path
    steps: int
    n_envs: int
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]

    @property
    def transition_count(self) -> int:
        return self.steps * self.n_envs

    def transitions(self, steps: int | None = None) -> Iterator[Transition]:
        """All steps, or the first ``steps``, as they were played: bit for bit, with axes in the same order in memory.

        ``infos`` has only what buffers read, ``TimeLimit.truncated``.
        """
        return islice(self._read(), steps)

    def _read(self) -> Iterator[Transition]:
        with gzip.open(self.path, "rb") as file:
            axes: dict[str, tuple[int, ...]] = pickle.load(file)
            obs = _restored(pickle.load(file), axes)
            for _ in range(self.steps):
                step = pickle.load(file)
                following = _restored(step["following"], axes)
                next_obs = following
                if step["last"]:
                    next_obs = {key: array.copy(order="K") for key, array in following.items()}
                    for key, rows in step["last"].items():
                        next_obs[key][step["done"]] = rows
                infos = [{"TimeLimit.truncated": bool(truncated)} for truncated in step["truncated"]]
                yield Transition(_whole(obs), _whole(next_obs), step["action"], step["reward"], step["done"], infos)
                obs = following


def write_play(path: Path, env: VecEnv, play: Iterable[Transition]) -> PlayFile:
    """Keep a play of ``env`` in a file. What ``next_obs`` and the next ``obs`` share is kept once."""
    steps = 0
    previous: Transition | None = None
    with gzip.open(path, "wb", compresslevel=1) as file:
        for transition in play:
            obs = _parts(transition.obs)
            if previous is None:
                axes = {key: _memory_order(array) for key, array in obs.items()}
                pickle.dump(axes, file)
                pickle.dump(_stored(obs, axes), file)
            else:
                pickle.dump(_step(previous, obs, axes), file)
            previous = transition
            steps += 1
        if previous is not None:
            pickle.dump(_step(previous, _parts(previous.next_obs), axes), file)
    return PlayFile(path, steps, env.num_envs, env.observation_space, env.action_space)


def _step(transition: Transition, following: dict[str, Array], axes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    done = np.asarray(transition.done, dtype=bool)
    last = {key: array[done] for key, array in _parts(transition.next_obs).items()} if done.any() else {}
    return {
        "following": _stored(following, axes),
        "last": last,
        "action": transition.action,
        "reward": transition.reward,
        "done": done,
        "truncated": [info.get("TimeLimit.truncated", False) for info in transition.infos],
    }


def _parts(observations: Any) -> dict[str, Array]:
    return observations if isinstance(observations, dict) else {_SINGLE: observations}


def _whole(parts: dict[str, Array]) -> Any:
    return parts.get(_SINGLE, parts)


def _memory_order(array: Array) -> tuple[int, ...]:
    """The axes, the one with the largest step in memory first."""
    return tuple(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))


def _stored(parts: dict[str, Array], axes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    return {key: np.ascontiguousarray(array.transpose(axes[key])) for key, array in parts.items()}


def _restored(stored: dict[str, Array], axes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    return {key: array.transpose(np.argsort(axes[key])) for key, array in stored.items()}
