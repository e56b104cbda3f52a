"""Replay buffers that sample sequences, for recurrent agents and world models.

Each observation is stored once, even if it is part of many sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.type_aliases import TensorDict
from stable_baselines3.common.vec_env import VecNormalize
from typing_extensions import Unpack

from sb3_extra_buffers.anonymous_memory import zeros
from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compressed.arguments import EpisodeEnd, LatentShape, StorageOptions
from sb3_extra_buffers.compressed.latents import StepLatents
from sb3_extra_buffers.compressed.replay_buffer import CompressedDictReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.compressed.rows import SINGLE, map_parts
from sb3_extra_buffers.compressed.sequence_index import Changes, SequenceIndex, SequenceShape
from sb3_extra_buffers.errors import ConfigurationError, EmptyBufferError
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.base_store import CPU
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.usage import MemoryUsage


class SequenceReplayBufferSamples(NamedTuple):
    """A batch of sequences. The first two axes are ``(batch, time)``, or ``(time, batch)`` with ``time_first``.

    Where ``mask`` is false, there is padding: the episode is over, and all values are zero or false.
    """

    observations: th.Tensor | TensorDict
    actions: th.Tensor
    rewards: th.Tensor
    is_first: th.Tensor
    """Whether the step begins an episode or follows a gap. Reset the recurrent state before it."""
    terminals: th.Tensor
    """Whether the step reached a terminal state, whose value is 0."""
    truncations: th.Tensor
    """Whether the episode ended with the step for another reason, such as a time limit."""
    mask: th.Tensor
    """True for steps, false for padding."""
    latents: TensorDict
    positions: Indices
    """An array for :meth:`CompressedSequenceReplayBuffer.update_latents`: the position of each step, -1 for padding."""
    next_observations: th.Tensor | TensorDict | None
    """The observation after each step, terminal ones included. ``None`` without ``include_next_observations=True``."""


class Steps(NamedTuple):
    """The steps of a batch as tensors or dicts of tensors, batch and time in one axis."""

    observations: Any
    next_observations: Any
    """An empty dict without ``include_next_observations``."""
    actions: th.Tensor
    rewards: th.Tensor
    latents: TensorDict


class CompressedSequenceReplayBuffer(StepLatents):
    """A replay buffer with compressed observations that samples sequences of ``burn_in + length + bootstrap_steps``.

    ``add()`` is SB3's, with ``latents`` as a further argument. Sequences are drawn uniformly from all complete ones.
    They never contain a gap. There is a gap before a step whose observation is not the next observation of the previous
    step, for instance after loading a buffer or resetting the environment in the middle of an episode.

    Further arguments: see :class:`~sb3_extra_buffers.compressed.base.BaseCompressedBuffer`.

    :param length: The number of steps that the agent learns from.
    :param burn_in: The number of steps before them, to warm up a recurrent state.
    :param bootstrap_steps: The number of steps after them, to bootstrap returns from.
    :param overlap: How many steps two consecutive sequences of an episode share. By default, a sequence begins at every
        step, so they share all but one.
    :param at_episode_end: ``"pad"``: a sequence ends with its episode, and the rest of it is zero, with ``mask`` false.
        At least one step after the burn-in is in the episode. ``"stop"``: all steps of a sequence are in one episode,
        so shorter episodes are never sampled. ``"cross"``: a sequence continues into the next episode of its
        environment.
    :param latents: Further arrays of each step, such as a recurrent state: their names, and the shape for one
        environment, or shape and dtype: ``{"state": (2, 256)}`` or ``{"state": ((2, 256), "float16")}``. The dtype is
        float32 by default.
    :param include_next_observations: Whether batches contain next observations, which takes more time and memory.
        Without them, the next observation of a step is the observation of the following step.
    :param time_first: Whether tensors have the shape ``(time, batch, ...)``, as PyTorch's recurrent layers expect.
    :param online_queue: Sample every step once soon after it was added, as in DreamerV3: batches first contain the
        sequences that were not sampled yet, in the order in which they were added and without overlap. The rest of a
        batch is drawn.
    :param detect_gaps: Whether to detect gaps. If you have no next observations, pass ``False`` here, and any values of
        the right shape as ``next_obs`` to ``add()``.
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
        length: int = 64,
        burn_in: int = 0,
        bootstrap_steps: int = 0,
        overlap: int | None = None,
        at_episode_end: EpisodeEnd = "pad",
        latents: Mapping[str, LatentShape] | None = None,
        include_next_observations: bool = False,
        time_first: bool = False,
        online_queue: bool = False,
        detect_gaps: bool = True,
        **options: Unpack[StorageOptions],
    ) -> None:
        if optimize_memory_usage:
            raise ConfigurationError(
                "Sequences end with a next observation, which optimize_memory_usage does not keep. Leave it out: next "
                "observations share memory with observations anyway."
            )
        self._shape = SequenceShape.from_arguments(length, burn_in, bootstrap_steps, overlap, at_episode_end)
        slots = max(buffer_size // max(n_envs, 1), 1)
        if slots < max(self._shape.total, 2):
            raise ConfigurationError(
                f"buffer_size={buffer_size} has room for {slots} steps of each of {n_envs} environments, which is too "
                f"short for a sequence of {self._shape.total} steps. Choose a larger buffer_size or a smaller length."
            )
        self.length, self.burn_in, self.bootstrap_steps, self.overlap = length, burn_in, bootstrap_steps, overlap
        self.at_episode_end: EpisodeEnd = at_episode_end
        self.time_first, self.online_queue, self.detect_gaps = time_first, online_queue, detect_gaps
        self._declare_latents(latents or {})
        self.include_next_observations = include_next_observations
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            handle_timeout_termination=handle_timeout_termination,
            **options,
        )

    _saved_fields = (*CompressedReplayBuffer._saved_fields, "episode_steps")
    _rebuilt: ClassVar[tuple[str, ...]] = ("_index", "_shape")
    _has_segments = False

    def _create_state(self) -> None:
        super()._create_state()
        self._index = SequenceIndex(self._shape, self.buffer_size, self.n_envs, self.online_queue)
        for store in self._stores.values():
            if isinstance(store, ObservationStore):
                store.reads_runs = True
        self.episode_steps = zeros((self.buffer_size, self.n_envs), np.dtype(np.uint32))
        """The number of each step in its episode, counted from 0, and again from 0 after a gap."""

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: Any,
        reward: Any,
        done: Any,
        infos: list[dict[str, Any]],
        latents: Mapping[str, Any] | None = None,
    ) -> None:
        """Store a step of all environments.

        :param latents: Values of shape ``(n_envs, ...)`` by name. Missing latents are zero.
        """
        with self._lock.held:
            self._begin_step(latents or {})
            self._index.begin_step()
            super().add(obs, next_obs, action, reward, done, infos)

    def _commit(self, pos: int, staged: list[tuple[Any, Any]], row: Any) -> None:
        super()._commit(pos, staged, row)
        index, previous = self._index, (pos - 1) % self.buffer_size
        index.remember_or_undo()
        has_ended = self._has_ended(previous)
        is_gap = ~has_ended
        if index.n_stored and self.detect_gaps:
            self.episode_steps[pos] = 0
            is_gap &= ~self._follows(previous, pos)
        elif index.n_stored:
            is_gap[:] = False
        np.multiply(self.episode_steps[previous] + 1, ~(has_ended | is_gap), out=self.episode_steps[pos])
        self._use_changes(index.add_step(pos, self.episode_steps, is_gap, self._has_ended(pos)))

    def _follows(self, previous: int, slot: int) -> npt.NDArray[np.bool_]:
        """For each environment, whether the observation in ``slot`` is the next observation of ``previous``."""
        follows = np.ones(self.n_envs, dtype=np.bool_)
        for store in self._stores.values():
            shared = store.is_shared(previous, slot)
            if not shared.all():
                # Usually these observations differ. But after a change of the codec, an equal one is stored again.
                envs = np.flatnonzero(~shared)
                where = [(1, np.full(len(envs), previous)), (0, np.full(len(envs), slot))]
                before, now = (part.reshape(len(envs), -1) for part in store.read_stored(where, envs, CPU))
                shared[envs] = [a.tobytes() == b.tobytes() for a, b in zip(before, now, strict=True)]
            follows &= shared
        return follows

    def _use_changes(self, changes: Changes) -> None:
        """Called when the places where sequences can begin have changed; after Ctrl-C, twice with the same changes."""

    def reset(self) -> None:
        with self._lock.held, uninterrupted():
            self._index.clear()
            super().reset()

    @property
    def n_sequences(self) -> int:
        """How many different sequences can be drawn."""
        return int(self._index.anchors.counts.sum())

    def sample(  # type: ignore[override]  # sequences instead of transitions
        self, batch_size: int, env: VecNormalize | None = None
    ) -> SequenceReplayBufferSamples:
        self._check_folder()
        with self._lock.held:
            self._check_not_empty()
            slots, envs = self._index.take_online(batch_size, self.pos)
            if len(slots) < batch_size:
                drawn = self._index.draw(batch_size - len(slots))
                slots, envs = (np.concatenate(parts) for parts in zip((slots, envs), drawn, strict=True))
            return self._sequences_at(slots, envs, env)

    def _check_not_empty(self) -> None:
        if self.n_sequences == 0:
            shape = self._shape
            raise EmptyBufferError(
                f"The buffer has no sequence of {shape.total} steps yet (burn_in + length + bootstrap_steps): it holds "
                f"{self._index.n_stored} steps of each environment. Add more steps before sampling"
                + (", or use at_episode_end='pad' if episodes are shorter." if shape.at_episode_end == "stop" else ".")
            )

    def _sequences_at(self, slots: Indices, envs: Indices, env: VecNormalize | None) -> SequenceReplayBufferSamples:
        """The sequences that begin at these slots."""
        offsets = np.arange(self._shape.total)[:, None]
        ages = (self.pos - 1 - slots) % self.buffer_size
        window = (slots + offsets) % self.buffer_size
        is_first = self.episode_steps.reshape(-1).take(window * self.n_envs + envs) == 0
        mask = np.ones(window.shape, dtype=np.bool_)
        if self._shape.at_episode_end == "pad":
            mask[1:] = ~np.logical_or.accumulate(is_first[1:] | (offsets[1:] > ages))
            window = np.where(mask, window, slots)
        positions = np.where(mask, (self._index.n_added - 1 - ages + offsets) * self.n_envs + envs, -1)
        places = window * self.n_envs + envs
        if not self.time_first:
            places, mask, is_first, positions = (
                np.ascontiguousarray(part.T) for part in (places, mask, is_first, positions)
            )
        flat, hidden = places.reshape(-1), None if mask.all() else ~mask.reshape(-1)
        terminals = self._dones_at(flat).reshape(places.shape) > 0
        ended = self._has_ended(np.divmod(places, self.n_envs))
        flags = {
            "is_first": is_first & mask,
            "terminals": terminals & mask,
            "truncations": ended & ~terminals & mask,
            "mask": mask,
        }
        observations, next_observations, actions, rewards, latents = (
            map_parts(lambda rows: rows.reshape(*places.shape, *rows.shape[1:]), part)
            for part in self._steps_at(flat, hidden, env)
        )
        return SequenceReplayBufferSamples(
            observations=observations,
            actions=actions,
            rewards=rewards,
            **self._flag_tensors(flags),
            latents=latents,
            positions=positions,
            next_observations=next_observations if self.include_next_observations else None,
        )

    def _flag_tensors(self, flags: dict[str, npt.NDArray[np.bool_]]) -> dict[str, th.Tensor]:
        return {name: self.to_torch(flag, copy=False) for name, flag in flags.items()}

    def _steps_at(self, places: Indices, hidden: npt.NDArray[np.bool_] | None, env: VecNormalize | None) -> Steps:
        """The steps at these places.

        :param hidden: Which of them are padding: their values become zero.
        """
        observations = self._observations_at(places, hidden, env)
        rewards = self._normalize_reward(self.rewards.reshape(-1).take(places), env)
        actions = self._actions_at(places)
        latents = self._latents_at(places)
        if hidden is not None:
            for values in (rewards, actions, *latents.values()):
                values[hidden] = 0
        parts = (*observations, actions, rewards, latents)
        return Steps(*(map_parts(lambda rows: self.to_torch(rows, copy=False), part) for part in parts))

    def _observations_at(self, places: Indices, hidden: npt.NDArray[np.bool_] | None, env: VecNormalize | None) -> Any:
        """Observations and next observations at these places, as arrays or dicts of arrays."""
        slots, envs = np.divmod(places, self.n_envs)
        wanted = [(0, slots), (1, slots)] if self.include_next_observations else [(0, slots)]
        parts = {key: store.read(wanted, envs, self.device) for key, store in self._stores.items()}
        columns = []
        for column in range(len(wanted)):
            found = {key: part[column] for key, part in parts.items()}
            normalized: Any = self._normalize_obs(found.get(SINGLE, found), env)
            if hidden is not None:
                map_parts(lambda array: array.__setitem__(hidden, 0), normalized)
            columns.append(normalized)
        return columns if self.include_next_observations else [*columns, {}]

    def _places_of(self, positions: Indices) -> tuple[Indices, npt.NDArray[np.bool_]]:
        """The places of the steps that are still stored, and a mask that selects them from ``positions``."""
        steps, envs = np.divmod(positions, self.n_envs)
        n_added = self._index.n_added
        is_stored = (positions >= 0) & (steps >= n_added - self._index.n_stored) & (steps < n_added)
        slots = (self.pos - (n_added - steps[is_stored])) % self.buffer_size
        return slots * self.n_envs + envs[is_stored], is_stored

    def check(self) -> None:
        super().check()
        with self._lock.held:
            self._index.check(self.pos)

    def memory_usage(self) -> MemoryUsage:
        usage = super().memory_usage()
        used = round(self._index.nbytes * self.size() / self.buffer_size)
        return dataclasses.replace(usage, index=usage.index + used)

    def _state(self) -> State:
        return {**super()._state(), "sequences": self._index.state()}

    def _restore(self, state: SavedState) -> None:
        super()._restore(state)
        self._index.restore(state.part("sequences"), self.pos, self.size())
        if 0 < self.size() < self.buffer_size and (self.episode_steps[self.pos - 1] >= self.size()).any():
            raise state.error("fields/episode_steps", "has steps of episodes that are not in the buffer")


class CompressedDictSequenceReplayBuffer(CompressedSequenceReplayBuffer, CompressedDictReplayBuffer):  # type: ignore[misc]  # as above
    """:class:`CompressedSequenceReplayBuffer` for Dict observation spaces. Each key is stored on its own."""
