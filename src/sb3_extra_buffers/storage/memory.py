"""Memory for an arena that grows without being copied where the system can do that."""

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
        self._map = _map_private(size)
        self.data: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def resize(self, size: int) -> None:
        """Make room for ``size`` bytes, keeping the contents."""
        old = self.data
        self.data = np.empty(0, dtype=np.uint8)
        if sys.platform == "linux":
            # The kernel moves page tables, not bytes. It refuses while somebody else looks at the memory
            # (a second thread that samples), and then the bytes are copied like everywhere else.
            del old
            try:
                self._map.resize(size)
            except BufferError:
                self._copy_into(size)
        else:
            self._copy_into(size)
        self.data = np.frombuffer(self._map, dtype=np.uint8)

    def _copy_into(self, size: int) -> None:
        larger = _map_private(size)
        kept = min(size, len(self._map))
        larger[:kept] = self._map[:kept]
        self._map = larger


def _map_private(size: int) -> mmap.mmap:
    size = max(size, 1)
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    # Python's default is shared memory, which a forked worker could change under us.
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Like ``numpy.zeros``, but a large array's memory goes back to the system when the array does.

    The allocator keeps such memory, and an array that is replaced by larger ones again and again leaves holes behind.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < mmap.PAGESIZE * 4:
        return np.zeros(shape, dtype=dtype)
    return np.frombuffer(_map_private(size), dtype=dtype).reshape(shape)
