"""Memory from the operating system, which grows without being copied where the system can do that."""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt


class AnonymousMemory:
    """Bytes from the operating system. Pages that were never written take no physical memory."""

    def __init__(self, size: int) -> None:
        self._map = map_private(size)
        self._data: npt.NDArray[np.uint8] | None = None

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        data = self._data
        if data is None:
            data = self._data = np.frombuffer(self._map, dtype=np.uint8)
        return data

    def resize(self, size: int) -> None:
        """Make room for ``size`` bytes, keeping the contents."""
        if sys.platform == "linux":
            # The kernel moves page tables, not bytes. Python refuses while another array refers to the memory (as in
            # a second thread that samples). Then the bytes are copied, as on other systems.
            self._data = None
            try:
                self._map.resize(size)
                return
            except BufferError:
                pass
        self._map, self._data = self._copied(size), None

    def _copied(self, size: int) -> mmap.mmap:
        larger = map_private(size)
        kept = min(size, len(self.data))
        np.frombuffer(larger, dtype=np.uint8)[:kept] = self.data[:kept]
        return larger


def map_private(size: int, descriptor: int = -1) -> mmap.mmap:
    """Memory of this process alone: zeros, or the bytes of a file that do not change with it."""
    size = max(size, 1)
    if sys.platform == "win32":
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_WRITE if descriptor == -1 else mmap.ACCESS_COPY)
    # Python's default is shared memory, which a forked process could change.
    return mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE | (mmap.MAP_ANONYMOUS if descriptor == -1 else 0))


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Like ``numpy.zeros``, but the memory of a large array goes back to the system when the array is freed.

    The allocator would keep it, so that an array which is replaced by larger ones again and again would leave holes.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < mmap.PAGESIZE * 4:
        return np.zeros(shape, dtype=dtype)
    return np.frombuffer(map_private(size), dtype=dtype).reshape(shape)
