"""Several replay buffers in one process that are sampled together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.compressed.drawing import draw_places
from sb3_extra_buffers.compressed.nstep_buffer import CompressedNStepReplayBuffer, n_step_returns, n_until
from sb3_extra_buffers.compressed.packed_fields import DONE_OR_NOT
from sb3_extra_buffers.compressed.prioritized_buffer import (
    CompressedPrioritizedReplayBuffer,
    PrioritizedReplayBufferSamples,
)
from sb3_extra_buffers.compressed.replay_buffer import CompressedDictReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.compressed.sum_tree import JoinedTrees
from sb3_extra_buffers.errors import EmptyBufferError
from sb3_extra_buffers.storage.compiled_gathering import Wanted
from sb3_extra_buffers.storage.joined import JoinedArrays, JoinedStores, places_of
from sb3_extra_buffers.storage.outputs import ALIGNMENT, Lease, OutputPool


class Places(NamedTuple):
    """The places of a batch's transitions, sorted by part."""

    numbers: Indices
    """The part of each transition."""
    slots: Indices
    envs: Indices


class Fields(NamedTuple):
    """All fields of a batch except its observations."""

    actions: npt.NDArray[Any]
    dones: npt.NDArray[np.float32]
    rewards: npt.NDArray[np.float32]
    """``(n, 1)``; for n-step returns ``(n, n_steps)``."""
    n_added: Indices | None
    """For n-step returns, how many rewards each return adds up."""


def default_part_class(observation_space: spaces.Space[Any]) -> type[CompressedReplayBuffer]:
    return CompressedDictReplayBuffer if isinstance(observation_space, spaces.Dict) else CompressedReplayBuffer


def draw_uniformly(parts: Sequence[Any], batch_size: int) -> Places:
    """Draw transitions uniformly from all parts. Needs only their sizes and positions, not their contents."""
    first = parts[0]
    n_envs, n_slots = first.n_envs, first.buffer_size
    shares = first.optimize_memory_usage  # then the slot at the position of a full part has no next observation
    sizes = [n_slots - shares if part.full else part.pos for part in parts]
    if not any(sizes):
        raise EmptyBufferError("The buffer is empty: add transitions before sampling from it.")
    if len(parts) == 1:  # the same as SB3's buffer draws with the same seed
        return Places(np.zeros(batch_size, dtype=np.int64), *draw_places(first, batch_size))
    firsts = np.zeros(len(parts), dtype=np.int64)
    if shares:
        firsts[:] = [part.pos + 1 if part.full else 0 for part in parts]
    drawn = np.random.random_sample(batch_size)
    drawn.sort()  # reading in order is faster, and the order within a batch does not matter
    return Places(*places_of(drawn, np.array(sizes, dtype=np.int64) * n_envs, firsts, n_slots, n_envs))


def indices_of(parts: Sequence[Any], numbers: Indices, places: Indices) -> Indices:
    """The indices in a batch of transitions: the places of the first part, then those of the second one, and so on."""
    indices: Indices = numbers * (parts[0].buffer_size * parts[0].n_envs) + places
    return indices


def numbers_and_places(parts: Sequence[Any], indices: Indices) -> tuple[Indices, Indices]:
    """The part of each index of a batch, and the place in that part: the reverse of :func:`indices_of`."""
    numbers, places = np.divmod(indices, parts[0].buffer_size * parts[0].n_envs)
    if len(indices) and not 0 <= numbers.min() <= numbers.max() < len(parts):
        raise IndexError(f"There are {len(parts)} parts, but indices of part {numbers.min()} or {numbers.max()}.")
    return numbers, places


class _Layout(NamedTuple):
    """Where the observations of a batch are in its memory."""

    n: int
    """The size of the batch."""
    arrays: list[tuple[str, tuple[int, ...], np.dtype[Any], tuple[int, int]]]
    """For each key: shape, dtype, and where observations and next observations start."""
    n_bytes: int


class Parts:
    """Buffers of the same class, spaces and size. They share a lock, batch memory, and an array of priorities."""

    def __init__(self, buffers: Sequence[Any], device: th.device, outputs: OutputPool | None = None) -> None:
        first = self.first = buffers[0]
        self.buffers = buffers
        self.outputs = outputs or OutputPool()
        self.outputs.device = device
        for buffer in buffers:
            buffer._outputs, buffer._lock = self.outputs, first._lock
            for store in buffer._stores.values():
                store.outputs, store.lock = self.outputs, first._lock
        self.is_prioritized = isinstance(first, CompressedPrioritizedReplayBuffer)
        # The class of prioritized buffers derives from that of n-step buffers, but n_steps=1 means no n-step returns.
        is_n_step = isinstance(first, CompressedNStepReplayBuffer) and (first.n_steps > 1 or not self.is_prioritized)
        self._n_steps = first.n_steps if is_n_step else None
        self.stores = {key: JoinedStores([buffer._stores[key] for buffer in buffers]) for key in first._stores}
        self._layout = _Layout(-1, [], 0)
        """That of the last batch."""
        self._joined: dict[tuple[str, ...], tuple[list[Any], JoinedArrays]] = {}
        """For each tuple of field names: functions that get these fields of a part, and the joined fields."""
        if self.is_prioritized:
            self.trees = JoinedTrees([buffer._tree for buffer in buffers])

    def sample(self, places: Places, env: VecNormalize | None) -> Any:
        """Read the transitions at these places."""
        with self.first._lock.held:
            fields, wanted = self.read_fields(places)
            n = len(places.slots)
            outs = self.batch_in(self.memory_for(n), n)
            for key, stores in self.stores.items():
                stores.fill(places.numbers, wanted, places.envs, outs[key])
        return self.batch_of(outs, fields, env)

    def memory_for(self, n: int) -> Lease:
        """Memory for the observations and next observations of ``n`` transitions."""
        return self.outputs.lend(self._layout_of(n).n_bytes, self.outputs.device)

    def batch_in(self, memory: Bytes, n: int) -> dict[str, list[npt.NDArray[Any]]]:
        """For each key, arrays in ``memory`` for the observations and the next observations."""
        return {
            key: [np.ndarray(shape, dtype, memory, start) for start in starts]
            for key, shape, dtype, starts in self._layout_of(n).arrays
        }

    def _layout_of(self, n: int) -> _Layout:
        """Where the arrays of each key start in the memory for ``n`` transitions."""
        layout = self._layout
        if n != layout.n:
            arrays, n_bytes = [], 0
            for key, store in self.first._stores.items():
                size = -(-n * math.prod(store.shape) * store.stored_dtype.itemsize // ALIGNMENT) * ALIGNMENT
                arrays.append((key, (n, *store.shape), store.stored_dtype, (n_bytes, n_bytes + size)))
                n_bytes += 2 * size
            layout = self._layout = _Layout(n, arrays, n_bytes)  # at once, so that Ctrl-C leaves no half of it
        return layout

    def read_fields(self, places: Places) -> tuple[Fields, Wanted]:
        """Read all fields except observations, and find the columns and slots of the observations."""
        first, (numbers, slots, envs) = self.first, places
        indices, last, n_added = slots * first.n_envs + envs, slots, None
        ended = ("_flags",) if self._all_packed("_flags") else ("dones", "timeouts")
        acting = "_action_bytes" if self._all_packed("_action_bytes") else "actions"
        if self._n_steps is None:
            actions, rewards, *flags = self._take((acting, "rewards", *ended), numbers, indices)
        else:
            window = (slots[:, None] + np.arange(self._n_steps)) % first.buffer_size
            all_indices = (window * first.n_envs + envs[:, None]).reshape(-1)
            rewards, *flags = self._take(("rewards", *ended), numbers.repeat(self._n_steps), all_indices)
            rewards = rewards.reshape(window.shape)
            newest = (np.array([part.pos for part in self.buffers]) - 1) % first.buffer_size
            # No return continues past the newest transition: the slot after it holds the oldest one.
            is_last = window == newest[numbers][:, None]
            for values in flags:
                is_last |= values.reshape(window.shape) > 0
            n_added = n_until(is_last)
            last = (slots + n_added - 1) % first.buffer_size
            (actions,) = self._take((acting,), numbers, indices)
            flags = self._take(ended, numbers, last * first.n_envs + envs)
        dones = DONE_OR_NOT.take(flags[0]) if len(flags) == 1 else flags[0] * (1 - flags[1])
        following = (0, (last + 1) % first.buffer_size) if first.optimize_memory_usage else (1, last)
        return Fields(actions.astype(first._action_dtype, copy=False), dones, rewards, n_added), [(0, slots), following]

    def batch_of(self, outs: dict[str, list[npt.NDArray[Any]]], fields: Fields, env: VecNormalize | None) -> Any:
        """Make a batch of tensors from observations and fields."""
        first = self.first
        pairs = {key: store.converted(outs[key]) for key, store in first._stores.items()}
        samples = first._batch_of(pairs, fields.actions, fields.dones, fields.rewards[:, :1], env)
        if fields.n_added is None:
            return samples
        rewards = first._normalize_reward(fields.rewards, env)
        returns, discounts = n_step_returns(rewards, fields.n_added, first.gamma)
        return samples._replace(rewards=first.to_torch(returns), discounts=first.to_torch(discounts))

    def weighted(
        self, samples: Any, priorities: npt.NDArray[np.float64], indices: Indices
    ) -> PrioritizedReplayBufferSamples:
        """Add importance-sampling weights and indices to a batch."""
        weights = (priorities.min(initial=np.inf) / priorities) ** self.first.beta
        weights_tensor = self.first.to_torch(weights.astype(np.float32).reshape(-1, 1))
        return PrioritizedReplayBufferSamples._make([*samples, weights_tensor, indices])

    def set_priorities(
        self, numbers: Indices, indices: Indices, priorities: npt.NDArray[np.float64], max_priority: float
    ) -> None:
        """Set priorities, to which ``alpha`` is not applied yet. New transitions get at least ``max_priority``."""
        self.raise_max_priority(max_priority)
        # An empty place keeps priority 0, so that it is never sampled.
        values = np.where(self.trees.get(numbers, indices) > 0, priorities**self.first.alpha, 0.0)
        self.trees.set(numbers, indices, values)

    def raise_max_priority(self, value: float) -> None:
        """Give new transitions of all parts at least this priority."""
        for part in self.buffers:
            part.max_priority = max(part.max_priority, value)

    def _all_packed(self, packed: str) -> bool:
        """Whether a field is still packed in all parts. If it is not in one of them, unpack it in all."""
        if not any(map(is_, map(attrgetter(packed), self.buffers), repeat(None))):
            return True
        for part in self.buffers:
            part._unpack(packed)
        return False

    def _take(self, names: tuple[str, ...], numbers: Indices, indices: Indices) -> list[npt.NDArray[Any]]:
        """Read rows of several fields from the parts ``numbers``."""
        if names not in self._joined:
            widths = [self.first.action_dim if "action" in name else 1 for name in names]
            self._joined[names] = [attrgetter(name) for name in names], JoinedArrays(*widths)
        getters, joined = self._joined[names]
        return joined.take([array for get in getters for array in map(get, self.buffers)], numbers, indices)
