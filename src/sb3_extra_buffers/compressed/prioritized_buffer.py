"""Prioritized experience replay, the proportional variant of https://arxiv.org/abs/1511.05952.

Any off-policy algorithm can use it. Its ``train()`` has to do this::

    buffer.progress_remaining = self._current_progress_remaining   # if beta is a schedule
    batch = buffer.sample(batch_size, env=self._vec_normalize_env)
    loss = (batch.weights * losses).mean()                         # one loss per transition
    buffer.update_priorities(batch.indices, td_errors)             # one error per transition

:class:`~sb3_extra_buffers.compressed.prioritized_dqn.PrioritizedDQN` does that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.type_aliases import Schedule, TensorDict
from stable_baselines3.common.vec_env import VecNormalize
from typing_extensions import Unpack

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compressed.arguments import StorageOptions
from sb3_extra_buffers.compressed.nstep_buffer import CompressedDictNStepReplayBuffer, CompressedNStepReplayBuffer
from sb3_extra_buffers.compressed.priorities import Beta as _Beta  # noqa: F401  # pickles of 1.0.0.dev0 name it
from sb3_extra_buffers.compressed.priorities import BufferWithPriorities, absolute_errors
from sb3_extra_buffers.compressed.replay_buffer import CompressedReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError, EmptyBufferError
from sb3_extra_buffers.state import SavedState, State

_LARGEST_TD_ERROR = 1e100
"""The largest TD error that a segment may have, so that the sum of all priorities stays finite."""


class PrioritizedReplayBufferSamples(NamedTuple):
    """SB3's fields, importance-sampling weights, and the indices for updating priorities."""

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


class CompressedPrioritizedReplayBuffer(BufferWithPriorities, CompressedNStepReplayBuffer):
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
        self._set_priority_options(alpha, beta, epsilon)
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
        if alpha == 0:  # all priorities are 1, whatever the errors
            return None
        with np.errstate(all="ignore"):
            errors = priorities ** (1 / alpha)
        if not 0 < alpha <= 1 or not ((priorities > 0) & (errors > 0) & (errors < _LARGEST_TD_ERROR)).all():
            raise segment.error("priorities", f"must be those of errors from 0 to {_LARGEST_TD_ERROR:g}")
        return priorities if alpha == self.alpha else errors**self.alpha

    def _complete_steps(self, n_steps: int, rows: Mapping[str, npt.NDArray[Any]], further: Any) -> None:
        steps = np.arange(max(0, n_steps - self.buffer_size), n_steps)
        places = (self.pos + steps)[:, None] % self.buffer_size * self.n_envs + np.arange(self.n_envs)
        super()._complete_steps(n_steps, rows, further)
        if further is None:
            self._tree[places.reshape(-1)] = self.max_priority**self.alpha
        else:
            self._tree[places.reshape(-1)] = further[steps].reshape(-1)
            if self.alpha > 0:
                self.max_priority = max(self.max_priority, float(further.max()) ** (1 / self.alpha))
        if self.optimize_memory_usage:
            self._tree[self._places(self.pos)] = 0.0

    def sample(  # type: ignore[override]  # more fields than SB3's samples
        self, batch_size: int, env: VecNormalize | None = None
    ) -> PrioritizedReplayBufferSamples:
        self._check_folder()
        with self._lock.held:
            if self._tree.total == 0:
                raise EmptyBufferError("The buffer is empty: add transitions before sampling from it.")
            indices, weights = self._draw(batch_size)
            samples = self._samples_at(*np.divmod(indices, self.n_envs), env)
        weights_tensor = self.to_torch(weights.reshape(-1, 1))
        return PrioritizedReplayBufferSamples._make([*samples, weights_tensor, indices])

    def update_priorities(self, indices: Indices, td_errors: th.Tensor | npt.ArrayLike) -> None:
        """Set the priorities of transitions from their TD errors, of either sign.

        :param indices: The ``indices`` of a batch.
        """
        errors = absolute_errors(td_errors).reshape(-1)
        if errors.shape != indices.shape:
            raise ConfigurationError(f"{len(indices)} transitions need {len(indices)} TD errors, not {len(errors)}.")
        with self._lock.held:
            self._set_priorities(indices, errors)

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
    """:class:`CompressedPrioritizedReplayBuffer` for Dict observation spaces. Each key is stored on its own."""
