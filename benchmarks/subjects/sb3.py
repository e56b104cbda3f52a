"""Stable-Baselines3's own buffers, and the adapter for all buffers with their interface."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer, RolloutBuffer

from benchmarks.recordings import Transition
from benchmarks.subjects.base import Subject, Task


class Sb3Like(Subject):
    """Buffers with SB3's interface, for replay and for rollouts."""

    def __init__(self, method: str, task: Task) -> None:
        super().__init__(method, task)
        self.buffer = self.replay_buffer()

    @abstractmethod
    def replay_buffer(self) -> ReplayBuffer: ...

    @abstractmethod
    def rollout_buffer(self, steps: int) -> RolloutBuffer: ...

    def add(self, step: Transition) -> None:
        self.buffer.add(*step)

    def sample(self, batch_size: int) -> Any:
        return self.buffer.sample(batch_size)

    def observations(self, batch: Any) -> tuple[Any, Any]:
        return _to_numpy(batch.observations), _to_numpy(batch.next_observations)

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            pickle.dump(self.buffer, file, pickle.HIGHEST_PROTOCOL)

    def load(self, path: Path) -> None:
        with path.open("rb") as file:
            self.buffer = pickle.load(file)

    def rollout(self, buffer: RolloutBuffer, steps: list[Transition], epochs: int, batch_size: int) -> None:
        """What PPO does with its buffer in one iteration."""
        zeros = th.zeros(self.task.n_envs)
        buffer.reset()
        for step in steps:
            buffer.add(step.obs, step.action, step.reward, step.done, zeros, zeros)
        for _ in range(epochs):
            for _ in buffer.get(batch_size):
                pass

    @property
    def spaces_and_size(self) -> dict[str, Any]:
        """The constructor arguments that all replay buffers take."""
        return {
            "buffer_size": self.task.capacity,
            "observation_space": self.task.observation_space,
            "action_space": self.task.action_space,
            "device": "cpu",
            "n_envs": self.task.n_envs,
        }


class Sb3(Sb3Like):
    distribution = "stable-baselines3"

    def replay_buffer(self) -> ReplayBuffer:
        is_dict = isinstance(self.task.observation_space, spaces.Dict)
        return (DictReplayBuffer if is_dict else ReplayBuffer)(**self.spaces_and_size)

    def rollout_buffer(self, steps: int) -> RolloutBuffer:
        return RolloutBuffer(**self.spaces_and_size | {"buffer_size": steps})


def _to_numpy(observations: Any) -> Any:
    if isinstance(observations, dict):
        return {key: part.numpy() for key, part in observations.items()}
    return observations.numpy()
