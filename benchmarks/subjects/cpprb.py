"""cpprb with ``next_of`` and, for stacked frames, ``stack_compress``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from cpprb import ReplayBuffer

from benchmarks.recordings import Transition
from benchmarks.subjects.base import Array, Subject, Task

Batch = dict[str, Array]


class Cpprb(Subject):
    """One buffer per environment: with ``next_of``, consecutive transitions must belong to the same episode."""

    distribution = "cpprb"

    def __init__(self, method: str, task: Task) -> None:
        super().__init__(method, task)
        self.buffers = [self._make() for _ in range(task.n_envs)]

    def _make(self) -> Any:
        space = self.task.observation_space
        shape = space.shape if len(space.shape) == 1 else (*space.shape[1:], space.shape[0])
        fields = {
            "obs": {"shape": shape, "dtype": space.dtype},
            "act": {"dtype": np.int64},
            "rew": {"dtype": np.float32},
            "done": {"dtype": np.bool_},
        }
        shared = {"stack_compress": "obs"} if self.task.stack > 1 else {}
        return ReplayBuffer(self.task.capacity // self.task.n_envs, fields, next_of="obs", **shared)

    def add(self, step: Transition) -> None:
        obs, next_obs = _channel_last(step.obs), _channel_last(step.next_obs)
        for env, buffer in enumerate(self.buffers):
            done = step.done[env]
            buffer.add(obs=obs[env], next_obs=next_obs[env], act=step.action[env], rew=step.reward[env], done=done)
            if done:
                buffer.on_episode_end()

    def sample(self, batch_size: int) -> Batch:
        share, rest = divmod(batch_size, len(self.buffers))
        parts = [buffer.sample(share + (env < rest)) for env, buffer in enumerate(self.buffers) if share + (env < rest)]
        if len(parts) == 1:
            return dict(parts[0])
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def observations(self, batch: Batch) -> tuple[Array, Array]:
        return _channel_first(batch["obs"]), _channel_first(batch["next_obs"])

    def save(self, path: Path) -> None:
        path.mkdir()
        for env, buffer in enumerate(self.buffers):
            buffer.save_transitions(str(path / f"{env}.npz"), safe=False)

    def load(self, path: Path) -> None:
        self.buffers = [self._make() for _ in self.buffers]
        for env, buffer in enumerate(self.buffers):
            buffer.load_transitions(str(path / f"{env}.npz"))


def _channel_last(observations: Array) -> Array:
    return observations.transpose(0, 2, 3, 1) if observations.ndim == 4 else observations


def _channel_first(observations: Array) -> Array:
    return observations.transpose(0, 3, 1, 2) if observations.ndim == 4 else observations
