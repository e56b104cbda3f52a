"""What all prioritized buffers share: options, a sum tree of priorities, and importance-sampling weights."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compressed.replay_buffer import CompressedReplayBuffer
from sb3_extra_buffers.compressed.rows import on_host
from sb3_extra_buffers.compressed.sum_tree import SumTree
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import DECODERS, ENCODERS, SavedState, State, encode
from sb3_extra_buffers.storage.usage import MemoryUsage


class BufferWithPriorities(CompressedReplayBuffer):
    """A replay buffer that draws places, ``slot * n_envs + env``, in proportion to their priorities."""

    _rebuilt: ClassVar[tuple[str, ...]] = ("_beta", "_tree")

    def _set_priority_options(self, alpha: float, beta: float | Schedule, epsilon: float) -> None:
        """Check and keep options. Call this before the constructor of the base class."""
        if not 0 <= alpha <= 1:
            raise ConfigurationError(f"alpha must be from 0 to 1, not {alpha}.")
        if not callable(beta) and not 0 <= beta <= 1:
            raise ConfigurationError(f"beta must be from 0 to 1, or a schedule, not {beta}.")
        if not 0 < epsilon < np.inf:
            raise ConfigurationError(f"epsilon must be a number above 0, not {epsilon}.")
        self.alpha = alpha
        self.epsilon = epsilon
        self.progress_remaining = 1.0
        """The argument of a ``beta`` schedule: from 1 down to 0 during training. The algorithm has to update it."""
        self.max_priority = 1.0
        self._beta = beta if isinstance(beta, Beta) else Beta(beta)

    def _create_state(self) -> None:
        super()._create_state()
        self._tree = SumTree(self.buffer_size * self.n_envs)

    @property
    def beta(self) -> float:
        return self._beta(self.progress_remaining)

    def reset(self) -> None:
        with self._lock.held, uninterrupted():
            super().reset()
            self._tree.clear()

    def _draw(self, n: int) -> tuple[Indices, npt.NDArray[np.float32]]:
        """Draw ``n`` places, and compute their importance-sampling weights."""
        # Stratified sampling: one place from each of n ranges of equal total priority.
        heights = (np.arange(n) + np.random.random_sample(n)) * self._tree.total / n
        places = self._tree.find(heights)
        priorities = self._tree[places]
        weights = (priorities.min(initial=np.inf) / priorities) ** self.beta
        return places, weights.astype(np.float32)

    def _set_priorities(self, places: Indices, errors: npt.NDArray[np.float64]) -> None:
        """Set priorities from absolute errors."""
        priorities = errors + self.epsilon
        self.max_priority = max(self.max_priority, float(priorities.max(initial=0.0)))
        # An empty place keeps priority 0, so that it is never sampled.
        self._tree[places] = np.where(self._tree[places] > 0, priorities**self.alpha, 0.0)

    def memory_usage(self) -> MemoryUsage:
        usage = super().memory_usage()
        return dataclasses.replace(usage, index=usage.index + round(self._tree.nbytes * self.size() / self.buffer_size))

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "beta": self._beta}

    def _state(self) -> State:
        return {
            **super()._state(),
            "progress_remaining": float(self.progress_remaining),
            "max_priority": self.max_priority,
            "tree": self._tree.state(),
        }

    def _restore(self, state: SavedState) -> None:
        super()._restore(state)
        self.progress_remaining = state.number("progress_remaining")
        self.max_priority = state.number("max_priority")
        if self.max_priority <= 0:
            raise state.error("max_priority", "must be above 0")
        self._tree.restore(state.part("tree"))


def absolute_errors(td_errors: th.Tensor | npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The absolute TD errors. Raises an error if one is NaN or infinite."""
    errors: npt.NDArray[np.float64] = np.abs(np.asarray(on_host(td_errors), dtype=np.float64))
    if not np.isfinite(errors).all():
        raise ConfigurationError(
            f"{np.sum(~np.isfinite(errors))} of {errors.size} TD errors are NaN or infinite, which cannot be "
            "priorities. Has the training diverged?"
        )
    return errors


def _encode_beta(beta: Beta, where: str) -> Any:
    value: Any = beta.value
    if isinstance(value, FloatSchedule):
        value = value.value_schedule
    if isinstance(value, ConstantSchedule):
        value = value.val
    if isinstance(value, LinearSchedule):
        return {"$linear": [encode(part, where) for part in (value.start, value.end, value.end_fraction)]}
    return encode(value, where)


class Beta:
    """``beta``, a number or a schedule, as a function. It can be pickled even if the schedule is a lambda."""

    def __init__(self, value: float | Schedule) -> None:
        self.value = value

    def __call__(self, progress_remaining: float) -> float:
        return float(self.value(progress_remaining) if callable(self.value) else self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    def __getstate__(self) -> bytes:
        pickled: bytes = cloudpickle.dumps(self.value)
        return pickled

    def __setstate__(self, state: bytes) -> None:
        self.value = cloudpickle.loads(state)


ENCODERS[Beta] = _encode_beta
DECODERS["$linear"] = lambda numbers: LinearSchedule(*numbers)
