"""How long it takes to read an observation, from SB3's buffer and from a store.

Both are measured as in training: the memory that SB3's buffer reads, and the memory that batches are written to, is in
no cache. The fixed time of a call and the work of other threads are left out.
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
"""The bytes of cold memory, more than stay in the caches while a program trains, and the fewest observations in it."""
_BATCH_BYTES, _SMALLEST_BATCH = 1 << 21, 4
"""The bytes of a measured batch, and the fewest observations in it."""
_BATCHES = 4
"""As many batches as are in use in training: a batch, the one before, and what they were copied from."""
_MEASUREMENTS = 15
"""How many times to measure."""
_PARTS = 16
"""The memory is released in this many parts, because releasing it takes time, too."""

cpu_time = time.perf_counter if sys.platform == "win32" else time.thread_time
"""The CPU seconds of this thread. Windows counts them in steps of 15.6 ms, so there, it is wall-clock time instead."""


def reading_steps(n_readers: int) -> int:
    """The number of steps that the measurements of several readers take, if each step makes one of them."""
    return n_readers * _MEASUREMENTS + _PARTS


class ColdMemory:
    """Observations, one per row, most of which are in no cache, and memory for batches of them.

    The memory is allocated and released little by little, because both take time. All of it is mapped from the system:
    the C allocator would keep some of it.
    """

    def __init__(self, observation_bytes: int) -> None:
        n = max(_COLD_BYTES // observation_bytes, _FEWEST_OBSERVATIONS)
        self.batch_size = max(_SMALLEST_BATCH, _BATCH_BYTES // observation_bytes) // 2 * 2
        self._mapped = AnonymousMemory((n + _BATCHES * self.batch_size) * observation_bytes)
        self._memory: Bytes = self._mapped.data.reshape(-1, observation_bytes)
        self.observations, self._batches = self._memory[:n], self._memory[n:]
        self._n_ready = self._turn = 0

    def grow(self, share: float) -> None:
        """Make this share of the memory resident, from 0 to 1."""
        n_ready = round(share * len(self._memory))
        self._memory[self._n_ready : n_ready] = 1
        self._n_ready = n_ready

    def shrink(self) -> bool:
        """Release a part of the memory. Returns whether that was the last one."""
        left = max(self._n_ready - -(-len(self._memory) // _PARTS), 0)
        row_bytes = self._memory.shape[1]
        self._mapped.discard(left * row_bytes, self._n_ready * row_bytes)
        self._n_ready = left
        return left == 0

    def batch(self, n: int) -> Bytes:
        """Memory for a batch of ``n`` observations. Several pieces of memory take turns."""
        self._turn = (self._turn + 1) % _BATCHES
        first = self._turn * self.batch_size
        return self._batches[first : first + n]


Read = Callable[[ColdMemory, int, int], None]
"""``read(cold, n, turn)`` reads ``n`` observations into cold memory: one half, and their successors. In each turn, it
reads other observations, because a processor soon predicts the branches of a decoder that reads the same ones again."""


class ReadingTime:
    """Measures how long ``read`` takes for each observation, a little at a time."""

    def __init__(self, read: Read) -> None:
        self._read, self._n = read, 0
        self._times: list[tuple[float, float]] = []
        """The seconds that each batch, and then a pair of observations, have taken."""

    @property
    def is_complete(self) -> bool:
        return len(self._times) >= _MEASUREMENTS

    def measure(self, cold: ColdMemory) -> None:
        self._n, turn = cold.batch_size, len(self._times)
        self._times.append((self._seconds(cold, self._n, turn), self._seconds(cold, 2, turn + 1)))

    @property
    def microseconds(self) -> float:
        """The time to read one observation by one thread. The fixed time of a call is left out."""
        batches, pairs = np.array(self._times).T
        return 1e6 * max(float(np.median(batches) - pairs.min()), 0.0) / (self._n - 2) + 1e-3

    def _seconds(self, cold: ColdMemory, n: int, turn: int) -> float:
        began = cpu_time()
        with alone():
            self._read(cold, n, turn)
        return cpu_time() - began


class Sb3Reader:
    """Reads like SB3's buffer: copies observations from random places, then copies the result to make tensors.

    Torch would make the second copy with several threads, and wait for those that start late.
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

    In each lane, their first frames are among ``firsts`` to ``stops - 1``.
    """

    def __init__(self, store: FrameStore, lanes: Indices, firsts: Indices, stops: Indices) -> None:
        self._store, self._lanes, self._firsts, self._counts = store, lanes, firsts, np.maximum(stops - firsts, 1)

    def __call__(self, cold: ColdMemory, n: int, turn: int) -> None:
        store, numbers, stack = self._store, turn * (n // 2) + np.arange(n // 2), self._store.layout.stack
        rounds, lanes = np.divmod(numbers, len(self._lanes))
        apart = stack + 2 * store.codec.frames_per_record
        back = 1 + rounds * apart + turn * apart // _MEASUREMENTS  # from the end of the lane
        firsts = self._firsts[lanes] + (-back) % self._counts[lanes]
        frames = cold.batch(n).reshape(2, len(numbers), stack, -1)
        store.gather(self._lanes[lanes], np.stack([firsts, firsts + 1]), [frames[0], frames[1]])
