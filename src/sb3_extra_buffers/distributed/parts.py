"""Replay buffers of one process that are sampled as if they were one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.compressed.flags import DONE_OR_NOT
from sb3_extra_buffers.compressed.nstep_buffer import CompressedNStepReplayBuffer, n_step_returns, n_until
from sb3_extra_buffers.compressed.prioritized_buffer import CompressedPrioritizedReplayBuffer
from sb3_extra_buffers.compressed.sum_tree import JoinedTrees
from sb3_extra_buffers.errors import EmptyBufferError
from sb3_extra_buffers.storage.base_store import BaseStore
from sb3_extra_buffers.storage.joined import JoinedArrays, JoinedStores, Wanted
from sb3_extra_buffers.storage.outputs import ALIGNMENT, OutputPool


class Places(NamedTuple):
    """Transitions of a batch, in the order of their parts."""

    numbers: Indices
    """Of parts."""
    slots: Indices
    envs: Indices


class Fields(NamedTuple):
    """What a batch has beside observations."""

    actions: npt.NDArray[Any]
    dones: npt.NDArray[np.float32]
    rewards: npt.NDArray[np.float32]
    """(n, 1), or those of all steps of n-step returns."""
    n_added: Indices | None
    """How many of these steps each return has."""


def draw_uniformly(parts: Sequence[Any], batch_size: int) -> Places:
    """Every transition with the same probability. Parts need only ``pos``, ``full`` and their sizes."""
    first = parts[0]
    n_envs, n_slots = first.n_envs, first.buffer_size
    shares = first.optimize_memory_usage
    if len(parts) == 1:
        return _as_sb3_draws(first, batch_size)
    counts = np.array([n_slots - shares if part.full else part.pos for part in parts]) * n_envs
    ends = counts.cumsum()
    if ends[-1] == 0:
        raise EmptyBufferError("The buffer is empty: add transitions before sampling from it.")
    # In the order of parts: the order of transitions in a batch does not matter, and reading is faster.
    drawn = np.sort(np.random.randint(0, ends[-1], size=batch_size))
    numbers = np.searchsorted(ends, drawn, side="right")
    slots, envs = np.divmod(drawn - (ends - counts)[numbers], n_envs)
    if shares:
        firsts = np.array([part.pos + 1 if part.full else 0 for part in parts])
        slots = (slots + firsts[numbers]) % n_slots
    return Places(numbers, slots, envs)


def _as_sb3_draws(part: Any, batch_size: int) -> Places:
    """With a single part, the same transitions as SB3's buffer with the same seed."""
    if not part.full and part.pos == 0:
        raise EmptyBufferError("The buffer is empty: add transitions before sampling from it.")
    if part.optimize_memory_usage and part.full:
        slots = (np.random.randint(1, part.buffer_size, size=batch_size) + part.pos) % part.buffer_size
    else:
        slots = np.random.randint(0, part.buffer_size if part.full else part.pos, size=batch_size)
    envs = np.random.randint(0, high=part.n_envs, size=(batch_size,))
    return Places(np.zeros(batch_size, dtype=np.int64), slots, envs)


def batch_bytes(stores: Mapping[str, BaseStore], n: int) -> int:
    """How much memory the observations and next observations of a batch take."""
    return 2 * sum(_aligned(store, n) for store in stores.values())


def batch_in(memory: Bytes, stores: Mapping[str, BaseStore], n: int) -> dict[str, list[npt.NDArray[Any]]]:
    """Observations and next observations of each key, one after the other in memory."""
    batch, start = {}, 0
    for key, store in stores.items():
        size = _aligned(store, n)
        batch[key] = [
            np.ndarray((n, *store.shape), store.stored_dtype, buffer=memory, offset=offset)
            for offset in (start, start + size)
        ]
        start += 2 * size
    return batch


def _aligned(store: BaseStore, n: int) -> int:
    return -(-n * math.prod(store.shape) * store.stored_dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Parts:
    """Buffers of the same class, spaces and size. They share a lock, memory for batches, and memory for priorities."""

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
        # With single steps, a prioritized buffer is none of n-step returns.
        is_n_step = isinstance(first, CompressedNStepReplayBuffer) and (first.n_steps > 1 or not self.is_prioritized)
        self._n_steps = first.n_steps if is_n_step else None
        self.stores = {key: JoinedStores([buffer._stores[key] for buffer in buffers]) for key in first._stores}
        self._actions, self._rewards = JoinedArrays(first.action_dim), JoinedArrays()
        self._flags = {name: JoinedArrays() for name in ("_flags", "dones", "timeouts")}
        if self.is_prioritized:
            self.trees = JoinedTrees([buffer._tree for buffer in buffers])

    def sample(self, places: Places, env: VecNormalize | None) -> Any:
        """The transitions at these places."""
        with self.first._lock.held:
            fields, wanted = self.read_fields(places)
            outs = self.empty_batch(len(places.slots))
            for key, stores in self.stores.items():
                stores.fill(places.numbers, wanted, places.envs, outs[key])
        return self.batch_of(outs, fields, env)

    def empty_batch(self, n: int) -> dict[str, list[npt.NDArray[Any]]]:
        """Memory for observations and next observations."""
        stores = self.first._stores
        return batch_in(self.outputs.lend(batch_bytes(stores, n), self.outputs.device), stores, n)

    def read_fields(self, places: Places) -> tuple[Fields, Wanted]:
        """All but the observations, and where these are."""
        first, (numbers, slots, envs) = self.first, places
        indices, last, n_added = slots * first.n_envs + envs, slots, None
        if self._n_steps is None:
            rewards = self._rewards.take([part.rewards for part in self.buffers], numbers, indices)
            dones = self._dones_at(numbers, indices)
        else:
            window = (slots[:, None] + np.arange(self._n_steps)) % first.buffer_size
            all_indices = (window * first.n_envs + envs[:, None]).reshape(-1)
            all_numbers = numbers.repeat(self._n_steps)
            rewards = self._rewards.take([part.rewards for part in self.buffers], all_numbers, all_indices)
            rewards = rewards.reshape(window.shape)
            newest = (np.array([part.pos for part in self.buffers]) - 1) % first.buffer_size
            # The slot after the newest transition holds the oldest one.
            is_last = (window == newest[numbers][:, None]) | self._has_ended(all_numbers, all_indices, window.shape)
            n_added = n_until(is_last)
            last = (slots + n_added - 1) % first.buffer_size
            dones = self._dones_at(numbers, last * first.n_envs + envs)
        actions = self._actions.take([part.actions for part in self.buffers], numbers, indices)
        following = (0, (last + 1) % first.buffer_size) if first.optimize_memory_usage else (1, last)
        return Fields(actions, dones, rewards, n_added), [(0, slots), following]

    def batch_of(self, outs: dict[str, list[npt.NDArray[Any]]], fields: Fields, env: VecNormalize | None) -> Any:
        """A batch as tensors."""
        first = self.first
        pairs = {key: store.converted(outs[key]) for key, store in first._stores.items()}
        samples = first._batch_of(pairs, fields.actions, fields.dones, fields.rewards[:, :1], env)
        if fields.n_added is None:
            return samples
        rewards = first._normalize_reward(fields.rewards, env)
        returns, discounts = n_step_returns(rewards, fields.n_added, first.gamma)
        return samples._replace(rewards=first.to_torch(returns), discounts=first.to_torch(discounts))

    def _dones_at(self, numbers: Indices, indices: Indices) -> npt.NDArray[np.float32]:
        if self._has_flags():
            return DONE_OR_NOT.take(self._field("_flags", numbers, indices))
        dones = self._field("dones", numbers, indices)
        dones *= 1 - self._field("timeouts", numbers, indices)
        return dones

    def _has_ended(self, numbers: Indices, indices: Indices, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        names = ("_flags",) if self._has_flags() else ("dones", "timeouts")
        ended = sum(self._field(name, numbers, indices) for name in names)
        found: npt.NDArray[np.bool_] = np.reshape(ended > 0, shape)
        return found

    def _has_flags(self) -> bool:
        """Whether all parts still have flags. If not, all get arrays."""
        if all(part._flags is not None for part in self.buffers):
            return True
        for part in self.buffers:
            part._unpack_flags()
        return False

    def _field(self, name: str, numbers: Indices, indices: Indices) -> npt.NDArray[Any]:
        return self._flags[name].take([getattr(part, name) for part in self.buffers], numbers, indices)
