"""The models that buffers are compared with: SB3's and sb3-contrib's buffers, or plain reference implementations."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from stable_baselines3.common.buffers import (
    DictReplayBuffer,
    DictRolloutBuffer,
    NStepReplayBuffer,
    ReplayBuffer,
    RolloutBuffer,
)
from stable_baselines3.common.type_aliases import DictReplayBufferSamples
from stable_baselines3.her import HerReplayBuffer

MODELS: dict[str, Any] = {
    "DictNStepReplayBuffer": NStepReplayBuffer,
    "DictPrioritizedReplayBuffer": DictReplayBuffer,
    "DictPrioritizedSequenceReplayBuffer": DictReplayBuffer,
    "DictReplayBuffer": DictReplayBuffer,
    "DictRolloutBuffer": DictRolloutBuffer,
    "DictSequenceReplayBuffer": DictReplayBuffer,
    "HerReplayBuffer": HerReplayBuffer,
    "MaskableDictRolloutBuffer": MaskableDictRolloutBuffer,
    "MaskableRolloutBuffer": MaskableRolloutBuffer,
    "NStepReplayBuffer": NStepReplayBuffer,
    "PrioritizedReplayBuffer": ReplayBuffer,
    "PrioritizedSequenceReplayBuffer": ReplayBuffer,
    "RecurrentDictRolloutBuffer": RecurrentDictRolloutBuffer,
    "RecurrentRolloutBuffer": RecurrentRolloutBuffer,
    "ReplayBuffer": ReplayBuffer,
    "RolloutBuffer": RolloutBuffer,
    "SequenceReplayBuffer": ReplayBuffer,
}
"""The model for each tested class, whose name is without "Compressed" or "Gpu"."""


def model_class(name: str) -> Any:
    return MODELS[name.removeprefix("Compressed").removeprefix("Gpu")]


def mark_last_as_cut(buffer: Any) -> None:
    """Mark a gap after the newest transitions, as a time limit.

    With ``optimize_memory_usage``, mark an episode end instead, because the following step overwrites the next
    observations.
    """
    newest = buffer.pos - 1
    if buffer.optimize_memory_usage:
        buffer.dones[newest] = 1
    else:
        buffer.timeouts[newest] = np.where(buffer.dones[newest] > 0, buffer.timeouts[newest], 1)


def clear_timeouts(buffer: Any, slot: int) -> None:
    """Clear the timeouts of :func:`mark_last_as_cut`, which SB3 does not overwrite if it does not handle timeouts."""
    for part in buffer._buffers.values() if isinstance(buffer, OneBufferPerKey) else [buffer]:
        part.timeouts[slot] = 0


class OneBufferPerKey:
    """A model for Dict spaces where SB3's class does not support them: one of SB3's buffers per key."""

    def __init__(self, cls: type[ReplayBuffer], size: int, space: spaces.Dict, actions: Any, **kwargs: Any) -> None:
        self._buffers = {key: cls(size, part, actions, **kwargs) for key, part in space.spaces.items()}
        self._first = next(iter(self._buffers.values()))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy.deepcopy looks some of these up
            raise AttributeError(name)
        if name in ("observations", "next_observations"):
            return {key: getattr(buffer, name) for key, buffer in self._buffers.items()}
        return getattr(self.__dict__["_first"], name)

    def add(self, obs: Any, next_obs: Any, *rest: Any) -> None:
        for key, buffer in self._buffers.items():
            buffer.add(obs[key], next_obs[key], *rest)

    def reset(self) -> None:
        for buffer in self._buffers.values():
            buffer.reset()

    def mark_last_done(self) -> None:
        for buffer in self._buffers.values():
            buffer.dones[buffer.pos - 1] = True

    def mark_last_as_cut(self) -> None:
        for buffer in self._buffers.values():
            mark_last_as_cut(buffer)

    def sample(self, batch_size: int) -> DictReplayBufferSamples:
        state, batches = np.random.get_state(), {}
        for key, buffer in self._buffers.items():
            np.random.set_state(state)
            batches[key] = buffer.sample(batch_size)
        return DictReplayBufferSamples(
            {key: batch.observations for key, batch in batches.items()},
            batches[key].actions,
            {key: batch.next_observations for key, batch in batches.items()},
            *batches[key][3:],
        )


class Drawn(NamedTuple):
    """A batch of 1-step or n-step transitions, as plain arrays."""

    actions: npt.NDArray[Any]
    last_slots: npt.NDArray[np.int64]
    dones: npt.NDArray[np.float32]
    rewards: npt.NDArray[np.float32]
    discounts: npt.NDArray[np.float32] | None


class Priorities:
    """Prioritized replay without a tree: an array of priorities for the transitions of ``model``."""

    def __init__(self, model: Any, alpha: float, beta: float, n_steps: int, gamma: float) -> None:
        self.model, self.alpha, self.beta = model, alpha, beta
        self.n_steps, self.gamma = n_steps, gamma
        self.largest = 1.0
        self.values = np.zeros(model.buffer_size * model.n_envs)

    def added(self, slot: int) -> None:
        n_envs = self.model.n_envs
        self.values[slot * n_envs : (slot + 1) * n_envs] = self.largest**self.alpha

    def cleared(self) -> None:
        self.values[:] = 0

    def update(self, indices: npt.NDArray[np.int64], errors: npt.NDArray[np.float64], epsilon: float) -> None:
        self.largest = max(self.largest, float(np.abs(errors).max()) + epsilon)
        for index, error in zip(indices.tolist(), np.abs(errors).tolist(), strict=True):
            self.values[index] = (error + epsilon) ** self.alpha

    def check_indices(self, indices: npt.NDArray[np.int64], random: npt.NDArray[np.float64]) -> None:
        """Check that stratum *i* of the priority sum gave the transition at ``random[i]`` of its height."""
        edges = np.concatenate([[0.0], np.cumsum(self.values)])
        heights = (np.arange(len(random)) + random) * edges[-1] / len(random)
        slack = 1e-9 * edges[-1]
        assert (edges[indices] <= heights + slack).all()
        assert (heights <= edges[indices + 1] + slack).all()
        assert (self.values[indices] > 0).all()

    def weights(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        chosen = self.values[indices]
        return ((chosen.min() / chosen) ** self.beta).astype(np.float32).reshape(-1, 1)

    def drawn(self, indices: npt.NDArray[np.int64]) -> Drawn:
        model = self.model
        slots, envs = np.divmod(indices, model.n_envs)
        last, rewards, counts = slots.copy(), [], []
        for i, (slot, env) in enumerate(zip(slots.tolist(), envs.tolist(), strict=True)):
            terms = []
            for step in range(self.n_steps):
                at = (slot + step) % model.buffer_size
                terms.append(model.rewards[at, env] * np.float32(self.gamma) ** np.float32(step))
                last[i] = at
                newest = at == (model.pos - 1) % model.buffer_size
                if newest or model.dones[at, env] or model.timeouts[at, env]:
                    break
            rewards.append(np.sum(terms, dtype=np.float32))
            counts.append(len(terms))
        dones = model.dones[last, envs] * (1 - model.timeouts[last, envs])
        discounts = None if self.n_steps == 1 else self.gamma ** np.array(counts, np.float32)[:, None]
        return Drawn(
            model.actions[slots, envs], last, dones[:, None], np.array(rewards, np.float32)[:, None], discounts
        )


def plain(values: Any) -> Any:
    """Convert tensors and array subclasses to plain arrays."""
    if isinstance(values, dict):
        return {key: plain(value) for key, value in values.items()}
    return values.cpu().numpy() if isinstance(values, th.Tensor) else np.array(values)
