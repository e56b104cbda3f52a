"""Prioritized experience replay, the proportional variant of https://arxiv.org/abs/1511.05952.

Any off-policy algorithm can use it. Its ``train()`` has to do this::

    buffer.progress_remaining = self._current_progress_remaining   # if beta is a schedule
    batch = buffer.sample(batch_size, env=self._vec_normalize_env)
    loss = (batch.weights * losses).mean()                         # one loss per transition
    buffer.update_priorities(batch.indices, td_errors)             # one error per transition

:class:`~sb3_extra_buffers.compressed.prioritized_dqn.PrioritizedDQN` does that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.type_aliases import Schedule, TensorDict
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize
from typing_extensions import Unpack

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compressed.arguments import StorageOptions
from sb3_extra_buffers.compressed.nstep_buffer import CompressedDictNStepReplayBuffer, CompressedNStepReplayBuffer
from sb3_extra_buffers.compressed.replay_buffer import CompressedReplayBuffer
from sb3_extra_buffers.compressed.sum_tree import SumTree
from sb3_extra_buffers.errors import ConfigurationError, EmptyBufferError
from sb3_extra_buffers.state import SavedState, State, encode, register_decoder, register_encoder
from sb3_extra_buffers.storage.usage import MemoryUsage


class PrioritizedReplayBufferSamples(NamedTuple):
    """SB3's fields, importance-sampling weights, and indices to update priorities by."""

    observations: th.Tensor | TensorDict
    actions: th.Tensor
    next_observations: th.Tensor | TensorDict
    dones: th.Tensor
    rewards: th.Tensor
    discounts: th.Tensor | None
    weights: th.Tensor
    """Importance-sampling weights, ``(batch_size, 1)``; the largest of a batch is 1."""
    indices: Indices
    """For :meth:`CompressedPrioritizedReplayBuffer.update_priorities`."""


class CompressedPrioritizedReplayBuffer(CompressedNStepReplayBuffer):
    """Samples transitions in proportion to ``(|TD error| + epsilon) ** alpha``.

    New transitions get the largest priority so far. Further arguments: those of
    :class:`~sb3_extra_buffers.compressed.replay_buffer.CompressedReplayBuffer`.

    :param alpha: From 0, uniform sampling, to 1, sampling in proportion to the TD error.
    :param beta: The exponent of the importance-sampling weights: from 0, no correction of the bias, to 1, full
        correction. A number or a schedule, which is a function of the remaining progress (from 1 to 0).
    :param epsilon: Keeps the priority of transitions without a TD error above 0.
    :param n_steps: With more than 1, rewards are n-step returns, as in ``CompressedNStepReplayBuffer``.
    :param gamma: The discount factor of the algorithm, for n-step returns.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        alpha: float = 0.6,
        beta: float | Schedule = 0.4,
        epsilon: float = 1e-6,
        n_steps: int = 1,
        gamma: float = 0.99,
        **options: Unpack[StorageOptions],
    ) -> None:
        if not 0 <= alpha <= 1:
            raise ConfigurationError(f"alpha must be from 0 to 1, not {alpha}.")
        if not callable(beta) and not 0 <= beta <= 1:
            raise ConfigurationError(f"beta must be from 0 to 1, or a schedule, not {beta}.")
        if not 0 < epsilon < np.inf:
            raise ConfigurationError(f"epsilon must be a number above 0, not {epsilon}.")
        self.alpha = alpha
        self.epsilon = epsilon
        self.progress_remaining = 1.0
        """The argument of a schedule. The algorithm has to update it."""
        self.max_priority = 1.0
        self._beta = beta if isinstance(beta, _Beta) else _Beta(beta)
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            n_steps=n_steps,
            gamma=gamma,
            **options,
        )

    _rebuilt = ("_beta", "_tree")

    def _create_state(self) -> None:
        super()._create_state()
        self._tree = SumTree(self.buffer_size * self.n_envs)

    @property
    def beta(self) -> float:
        return self._beta(self.progress_remaining)

    def _commit(self, pos: int, *stored: Any) -> None:
        super()._commit(pos, *stored)
        self._tree[self._places(pos)] = self.max_priority**self.alpha
        if self.optimize_memory_usage:
            self._tree[self._places(self.pos)] = 0.0  # its observation is now the newest next observation

    def _further_segment_state(self, slots: Indices, priorities: bool) -> State:
        if not priorities:
            return {}
        places = slots[:, None] * self.n_envs + np.arange(self.n_envs)
        return {"priorities": self._tree[places], "alpha": float(self.alpha)}

    def _checked_further_state(self, segment: SavedState, n_steps: int) -> npt.NDArray[np.float64] | None:
        if not segment.has("priorities"):
            return None
        priorities = segment.array("priorities", np.float64, (n_steps, self.n_envs))
        alpha = segment.number("alpha")
        if not (np.isfinite(priorities) & (priorities >= 0)).all() or not 0 <= alpha <= 1:
            raise segment.error("priorities", "must be numbers, and none below 0")
        if alpha == self.alpha:
            return priorities
        return None if alpha == 0 else (priorities ** (1 / alpha)) ** self.alpha

    def _place_further_state(self, n_steps: int, rows: Mapping[str, npt.NDArray[Any]], further: Any) -> None:
        steps = np.arange(max(0, n_steps - self.buffer_size), n_steps)
        places = (self.pos + steps)[:, None] % self.buffer_size * self.n_envs + np.arange(self.n_envs)
        super()._place_further_state(n_steps, rows, further)
        if further is None:
            self._tree[places.reshape(-1)] = self.max_priority**self.alpha
        else:
            self._tree[places.reshape(-1)] = further[steps].reshape(-1)
            if self.alpha > 0:
                self.max_priority = max(self.max_priority, float(further.max()) ** (1 / self.alpha))
        if self.optimize_memory_usage:
            self._tree[self._places(self.pos)] = 0.0

    def reset(self) -> None:
        with self._lock.held:
            super().reset()
            self._tree.clear()

    def sample(  # type: ignore[override]  # more fields than SB3's samples
        self, batch_size: int, env: VecNormalize | None = None
    ) -> PrioritizedReplayBufferSamples:
        self._check_folder()
        with self._lock.held:
            total = self._tree.total
            if total == 0:
                raise EmptyBufferError("The buffer is empty: add transitions before sampling from it.")
            # Stratified: one from each of batch_size ranges of equal total priority.
            heights = (np.arange(batch_size) + np.random.random_sample(batch_size)) * total / batch_size
            indices = self._tree.find(heights)
            priorities = self._tree[indices]
            weights = (priorities.min(initial=np.inf) / priorities) ** self.beta
            samples = self._samples_at(*np.divmod(indices, self.n_envs), env)
        weights_tensor = self.to_torch(weights.astype(np.float32).reshape(-1, 1))
        return PrioritizedReplayBufferSamples._make([*samples, weights_tensor, indices])

    def update_priorities(self, indices: Indices, td_errors: th.Tensor | npt.ArrayLike) -> None:
        """Set the priorities of transitions from their TD errors, of either sign.

        :param indices: Of a batch.
        """
        if isinstance(td_errors, th.Tensor):
            td_errors = td_errors.detach().cpu().numpy()
        errors = np.abs(np.asarray(td_errors, dtype=np.float64).reshape(-1))
        if errors.shape != indices.shape:
            raise ConfigurationError(f"{len(indices)} transitions need {len(indices)} TD errors, not {len(errors)}.")
        if not np.isfinite(errors).all():
            raise ConfigurationError(
                f"{np.sum(~np.isfinite(errors))} of {len(errors)} TD errors are NaN or infinite, which cannot be "
                "priorities. Has the training diverged?"
            )
        priorities = errors + self.epsilon
        with self._lock.held:
            self.max_priority = max(self.max_priority, float(priorities.max(initial=0.0)))
            # An empty slot keeps priority 0, so that it is never sampled.
            self._tree[indices] = np.where(self._tree[indices] > 0, priorities**self.alpha, 0.0)

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
        self._tree.restore(state.part("tree"))

    def _places(self, slot: int) -> Indices:
        return np.arange(slot * self.n_envs, (slot + 1) * self.n_envs)

    def _samples_at(
        self, slots: Indices, envs: Indices, env: VecNormalize | None, last_slots: Indices | None = None
    ) -> Any:
        # With single steps the algorithm itself discounts, so the batch has no discounts.
        if self.n_steps == 1:
            return CompressedReplayBuffer._samples_at(self, slots, envs, env, last_slots)
        return super()._samples_at(slots, envs, env, last_slots)


class CompressedDictPrioritizedReplayBuffer(  # type: ignore[misc]  # sample() has more fields than SB3's
    CompressedPrioritizedReplayBuffer, CompressedDictNStepReplayBuffer
):
    """The same for Dict observation spaces, each key stored on its own."""


def _encode_beta(beta: _Beta, where: str) -> Any:
    value: Any = beta.value
    if isinstance(value, FloatSchedule):
        value = value.value_schedule
    if isinstance(value, ConstantSchedule):
        value = value.val
    if isinstance(value, LinearSchedule):
        return {"$linear": [encode(part, where) for part in (value.start, value.end, value.end_fraction)]}
    return encode(value, where)


class _Beta:
    """A number or a schedule as a function that can be pickled even if the schedule is a lambda."""

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


register_encoder(_Beta, _encode_beta)
register_decoder("$linear", lambda numbers: LinearSchedule(*numbers))
