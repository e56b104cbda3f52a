"""Sequences sampled by priority, as in R2D2 (https://openreview.net/forum?id=r1lyTjAqYX)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.type_aliases import Schedule, TensorDict
from stable_baselines3.common.vec_env import VecNormalize
from typing_extensions import Unpack

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compressed.arguments import SequenceOptions
from sb3_extra_buffers.compressed.priorities import BufferWithPriorities, absolute_errors
from sb3_extra_buffers.compressed.rows import on_host
from sb3_extra_buffers.compressed.sequence_buffer import (
    CompressedDictSequenceReplayBuffer,
    CompressedSequenceReplayBuffer,
)
from sb3_extra_buffers.compressed.sequence_index import Changes
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.state import SavedState


class PrioritizedSequenceReplayBufferSamples(NamedTuple):
    """The fields of :class:`.SequenceReplayBufferSamples`, importance-sampling weights, and numbers of sequences."""

    observations: th.Tensor | TensorDict
    actions: th.Tensor
    rewards: th.Tensor
    is_first: th.Tensor
    terminals: th.Tensor
    truncations: th.Tensor
    mask: th.Tensor
    latents: TensorDict
    positions: Indices
    next_observations: th.Tensor | TensorDict | None
    weights: th.Tensor
    """Importance-sampling weights of the sequences, ``(batch_size,)``; the largest of a batch is 1."""
    sequences: Indices
    """Identify the sequences for :meth:`CompressedPrioritizedSequenceReplayBuffer.update_priorities`. A NumPy array."""


class CompressedPrioritizedSequenceReplayBuffer(BufferWithPriorities, CompressedSequenceReplayBuffer):
    """Samples sequences in proportion to their priority: a mix of the largest and the mean TD error of their steps.

    The priority of a sequence is ``(eta * max + (1 - eta) * mean + epsilon) ** alpha`` of its absolute TD errors. New
    sequences get the largest priority so far. Further arguments: those of
    :class:`~sb3_extra_buffers.compressed.sequence_buffer.CompressedSequenceReplayBuffer`.

    :param alpha: From 0, uniform sampling, to 1, sampling in proportion to TD errors.
    :param beta: The exponent of the importance-sampling weights: from 0, no correction of the bias, to 1, full
        correction. A number or a schedule, which is a function of the remaining progress (from 1 to 0).
    :param epsilon: Keeps the priority of sequences without TD errors above 0.
    :param eta: From 0, the mean of a sequence's TD errors, to 1, the largest of them.
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
        alpha: float = 0.9,
        beta: float | Schedule = 0.6,
        epsilon: float = 1e-6,
        eta: float = 0.9,
        **options: Unpack[SequenceOptions],
    ) -> None:
        self._set_priority_options(alpha, beta, epsilon)
        if not 0 <= eta <= 1:
            raise ConfigurationError(f"eta must be from 0 to 1, not {eta}.")
        if options.get("online_queue"):
            raise ConfigurationError(
                "online_queue=True is not for prioritized buffers, where new sequences have the largest priority "
                "anyway. Leave it out."
            )
        self.eta = eta
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            **options,
        )

    def _use_changes(self, changes: Changes) -> None:
        self._tree[changes.removed] = 0.0
        self._tree[changes.added] = self.max_priority**self.alpha

    def sample(  # type: ignore[override]  # more fields
        self, batch_size: int, env: VecNormalize | None = None
    ) -> PrioritizedSequenceReplayBufferSamples:
        self._check_folder()
        with self._lock.held:
            self._check_not_empty()
            places, weights = self._draw(batch_size)
            samples = self._sequences_at(*np.divmod(places, self.n_envs), env)
        sequences = samples.positions[0] if self.time_first else samples.positions[:, 0]
        return PrioritizedSequenceReplayBufferSamples(
            *samples, weights=self.to_torch(weights), sequences=sequences.copy()
        )

    def update_priorities(
        self,
        sequences: Indices,
        td_errors: th.Tensor | npt.ArrayLike,
        mask: th.Tensor | npt.ArrayLike | None = None,
    ) -> None:
        """Set the priorities of sequences from the TD errors of their steps, of either sign.

        Sequences that have been overwritten since they were sampled are ignored.

        :param sequences: The ``sequences`` of a batch.
        :param td_errors: ``(batch, steps)``, or ``(steps, batch)`` with ``time_first``, for any number of steps.
        :param mask: Which of these steps count; by default all. Pass ``batch.mask`` of the steps to ignore padding.
        """
        errors = absolute_errors(td_errors)
        valid = np.ones(errors.shape, dtype=np.bool_) if mask is None else np.asarray(on_host(mask), dtype=np.bool_)
        if self.time_first:
            errors, valid = errors.T, valid.T
        if errors.ndim != 2 or len(errors) != len(sequences) or valid.shape != errors.shape:
            raise ConfigurationError(
                f"The TD errors of {len(sequences)} sequences, and their mask, must have two axes, one of them of "
                f"length {len(sequences)}, but have the shapes {errors.shape} and {valid.shape}."
            )
        errors = np.where(valid, errors, 0.0)
        mean = errors.sum(axis=1) / np.maximum(valid.sum(axis=1), 1)
        mixed = self.eta * errors.max(axis=1, initial=0.0) + (1 - self.eta) * mean
        with self._lock.held:
            places, is_stored = self._places_of(np.asarray(sequences))
            self._set_priorities(places, mixed[is_stored])

    def _restore(self, state: SavedState) -> None:
        super()._restore(state)
        anchors = self._index.anchors
        places = [anchors.of_env(env) * self.n_envs + env for env in range(self.n_envs)]
        has_priority = np.flatnonzero(self._tree[np.arange(len(self._tree))])
        if not np.array_equal(np.sort(np.concatenate(places)), has_priority):
            raise state.error("tree/priorities", "are not those of the sequences that can be sampled")


class CompressedDictPrioritizedSequenceReplayBuffer(  # type: ignore[misc]  # sample() has more fields than SB3's
    CompressedPrioritizedSequenceReplayBuffer, CompressedDictSequenceReplayBuffer
):
    """:class:`CompressedPrioritizedSequenceReplayBuffer` for Dict observation spaces. Each key is stored on its own."""
