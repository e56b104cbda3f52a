"""Memory mapped directly from the operating system. On Linux, growing it copies no bytes."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt


class AnonymousMemory:
    """Zeroed bytes from the operating system. Untouched pages take no physical memory."""

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
        """Change the size to ``size`` bytes and keep the contents."""
        if sys.platform == "linux":
            # The kernel moves page table entries instead of bytes. Python refuses to resize the map while another
            # array refers to it, for instance in a thread that samples. Then the bytes are copied, as on other systems.
            self._data = None
            try:
                self._map.resize(size)
                return
            except BufferError:
                pass
        self._map, self._data = self._copied(size), None

    def discard(self, start: int, end: int) -> None:
        """Return the whole pages within a range of bytes to the system. Their contents are undefined afterwards."""
        if sys.platform != "win32":
            start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if start < end:
                with contextlib.suppress(OSError):  # the system refuses pages that are locked in memory
                    self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def _copied(self, size: int) -> mmap.mmap:
        larger = map_private(size)
        kept = min(size, len(self.data))
        np.frombuffer(larger, dtype=np.uint8)[:kept] = self.data[:kept]
        return larger


def map_private(size: int, descriptor: int = -1) -> mmap.mmap:
    """Map memory that is private to this process: zeros, or a file whose pages are copied on write."""
    size = max(size, 1)
    if sys.platform == "win32":
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_WRITE if descriptor == -1 else mmap.ACCESS_COPY)
    # By default, Python maps shared memory, which a forked process could change.
    return mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE | (mmap.MAP_ANONYMOUS if descriptor == -1 else 0))


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Like ``numpy.zeros``, but the memory of a large array goes back to the system when the array is freed.

    C's allocator can keep freed memory for itself. Replacing an array again and again by a larger one would then
    fragment the heap.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < mmap.PAGESIZE * 4:
        return np.zeros(shape, dtype=dtype)
    return np.frombuffer(map_private(size), dtype=dtype).reshape(shape)
