"""How long it takes to read an observation, from SB3's buffer and from a store.

Both are measured in the state that training is in: what SB3's buffer reads, and what a batch is written to, is in no
cache. The time of a call, however much it reads, is left out, and so is the work of other threads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from sb3_extra_buffers.anonymous_memory import AnonymousMemory
from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.parallel import alone
from sb3_extra_buffers.storage.frame_store import FrameStore

_COLD_BYTES, _FEWEST_OBSERVATIONS = 48 << 20, 8
"""More than the share of a cache that a program keeps while it trains."""
_BATCH_BYTES, _SMALLEST_BATCH = 1 << 21, 4
_BATCHES = 4
"""As many are in use in training: a batch, the one before, and what they were copied from."""
_TIMES = 15
_PARTS = 16
"""The memory is given back in so many parts, because giving it back takes time, too."""

cpu_time = time.perf_counter if sys.platform == "win32" else time.thread_time
"""The seconds that this thread has worked. Windows counts them in steps of 15.6 ms, so there, waiting counts, too."""


class ColdMemory:
    """Observations of a size, one per row, most of which are in no cache, and memory for batches of them.

    It is taken and given back little by little, because both take time. All of it is mapped from the system: the C
    allocator would not give all of it back.
    """

    def __init__(self, observation_bytes: int) -> None:
        n = max(_COLD_BYTES // observation_bytes, _FEWEST_OBSERVATIONS)
        self.batch_size = max(_SMALLEST_BATCH, _BATCH_BYTES // observation_bytes) // 2 * 2
        self._mapped = AnonymousMemory((n + _BATCHES * self.batch_size) * observation_bytes)
        self._memory: Bytes = self._mapped.data.reshape(-1, observation_bytes)
        self.observations, self._batches = self._memory[:n], self._memory[n:]
        self._n_ready = self._turn = 0

    def grow(self, share: float) -> None:
        """Take so much of the memory, from 0 to 1."""
        n_ready = round(share * len(self._memory))
        self._memory[self._n_ready : n_ready] = 1
        self._n_ready = n_ready

    def shrink(self) -> bool:
        """Give a part of the memory back. Returns whether that was the last one."""
        left = max(self._n_ready - -(-len(self._memory) // _PARTS), 0)
        row_bytes = self._memory.shape[1]
        self._mapped.discard(left * row_bytes, self._n_ready * row_bytes)
        self._n_ready = left
        return left == 0

    def batch(self, n: int) -> Bytes:
        """Memory for a batch of ``n`` observations: one of several pieces, in turn."""
        self._turn = (self._turn + 1) % _BATCHES
        first = self._turn * self.batch_size
        return self._batches[first : first + n]


Read = Callable[[ColdMemory, int, int], None]
"""``read(cold, n, turn)`` reads ``n`` observations, each second one the successor of another, into cold memory. In each
turn, it reads other ones: a processor soon knows the branches of a decoder that reads the same again."""


class ReadingTime:
    """Measures how long ``read`` takes for each observation, a little at a time."""

    def __init__(self, read: Read) -> None:
        self._read, self._n = read, 0
        self._times: list[float] = []
        self._times_of_pairs: list[float] = []

    @property
    def is_complete(self) -> bool:
        return len(self._times) == _TIMES

    def measure(self, cold: ColdMemory) -> None:
        self._n = cold.batch_size
        self._times.append(self._seconds(cold, self._n))
        self._times_of_pairs.append(self._seconds(cold, 2))

    @property
    def microseconds(self) -> float:
        """For one observation, by one thread."""
        whole, pair = float(np.median(self._times)), min(self._times_of_pairs)
        return 1e6 * max(whole - pair, 0.0) / (self._n - 2) + 1e-3

    def _seconds(self, cold: ColdMemory, n: int) -> float:
        began = cpu_time()
        with alone():
            self._read(cold, n, len(self._times))
        return cpu_time() - began


class Sb3Reader:
    """Copies observations from random places, as SB3's indexing does, and copies the result once more, as SB3 does to
    make tensors.

    Torch would make that copy with several threads, and wait for those that start late.
    """

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def __call__(self, cold: ColdMemory, n: int, turn: int) -> None:
        places = self._random.integers(0, len(cold.observations), n)
        found, tensors = cold.batch(n), cold.batch(n)
        cold.observations.take(places, axis=0, out=found, mode="clip")
        tensors[:] = found


class StoreReader:
    """Reads observations of a store that are far apart, as ``sample`` does, and other ones in each turn.

    They begin at the frames from ``first`` to ``stop - 1``.
    """

    def __init__(self, store: FrameStore, lanes: Indices, first: int, stop: int) -> None:
        self._store, self._lanes, self._first, self._n = store, lanes, first, max(stop - first, 1)

    def __call__(self, cold: ColdMemory, n: int, turn: int) -> None:
        store, numbers, stack = self._store, turn * (n // 2) + np.arange(n // 2), self._store.layout.stack
        apart = stack + 2 * store.codec.frames_per_record
        firsts = self._first + (self._n - 1 - numbers // len(self._lanes) * apart - turn * apart // _TIMES) % self._n
        frames = cold.batch(n).reshape(2, len(numbers), stack, -1)
        store.gather(self._lanes[numbers % len(self._lanes)], np.stack([firsts, firsts + 1]), [frames[0], frames[1]])
