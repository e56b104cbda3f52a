"""A ring buffer for the bytes of records: first in, first out.

Bytes are appended at ``head``, and the oldest live byte is at ``tail``::

    |....tail########head....limit|          |####head....tail######wrap|
             not wrapped                                wrapped

The arena never compacts. When live bytes fill it, it grows by a small step, so its size stays close to that of its live
bytes, even after they have been replaced many times.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.anonymous_memory import AnonymousMemory
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.memory import Memory, PartOfBytes, saved_memory

_SMALLEST_STEP = 1 << 16
"""The initial memory of an arena, and the least by which it grows, in bytes."""


class Arena:
    """A ring of bytes that can grow. Every block is contiguous: none is split at the end of the ring."""

    def __init__(self) -> None:
        self.head = 0
        self.tail = 0
        self.limit = 0
        """The size of the ring. Memory beyond it was never written, so it is not resident."""
        self.wrap: int | None = None
        """The end of the live bytes above ``tail`` if the head has wrapped around, otherwise ``None``."""
        self._memory: Memory = AnonymousMemory(_SMALLEST_STEP)

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        return self._memory.data

    @property
    def live_bytes(self) -> int:
        """Bytes between tail and head, including dead ones in between."""
        if self.wrap is None:
            return self.head - self.tail
        return self.head + self.wrap - self.tail

    @property
    def nbytes(self) -> int:
        """The size of the ring: an upper bound of its resident memory."""
        return self.limit

    def allocate(self, size: int) -> int | None:
        """Reserve ``size`` bytes and return where they start, or ``None`` if there is no room without :meth:`grow`."""
        if self.wrap is not None:
            start = self.head
            if start + size >= self.tail:  # an equal head and tail would mean "empty"
                return None
        elif self.head + size <= self.limit:
            start = self.head
        elif size < self.tail:
            self.wrap = self.head
            start = 0
        else:
            return None
        self.head = start + size
        return start

    def grow(self, size: int) -> tuple[int, int]:
        """Make room for ``size`` more bytes.

        Returns ``(boundary, shift)``: blocks that started at ``boundary`` or later now start ``shift`` bytes later.
        """
        step = max(size + 1, self.limit // 64, _SMALLEST_STEP)
        if self.wrap is None:
            self._reserve(self.limit + step)
            self.limit += step
            return self.limit, 0
        self._reserve(self.wrap + step)
        data, boundary, limit = self.data, self.tail, max(self.limit, self.wrap + step)
        # No function is called from here until the caller has updated the starts of its blocks. Python handles Ctrl-C
        # in calls, so it cannot come in between.
        data[self.tail + step : self.wrap + step] = data[self.tail : self.wrap]
        self.tail += step
        self.wrap += step
        self.limit = limit
        return boundary, step

    def write(self, start: int, data: npt.NDArray[np.uint8]) -> None:
        """Write bytes to memory that :meth:`allocate` reserved."""
        self.data[start : start + len(data)] = data

    def free_until(self, start: int) -> None:
        """Free all bytes that are older than the block at ``start``."""
        if self.wrap is not None and start < self.tail:
            self.wrap = None
        self.tail = start

    def discard_dead(self) -> None:
        """Return the memory of dead bytes to the system. For arenas to which nothing will be appended any more."""
        if isinstance(self._memory, AnonymousMemory):
            for start, end in self._gaps():
                self._memory.discard(start, end)

    def _gaps(self) -> list[tuple[int, int]]:
        """The ranges without live bytes, as ``(start, end)``."""
        at, gaps = 0, []
        for start, end in sorted(self._live_ranges):
            gaps.append((at, start))
            at = end
        return [*gaps, (at, self.limit)]

    def clear(self) -> None:
        self.head = self.tail = 0
        self.wrap = None

    def distance(self, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How far behind the tail each block starts, counted along the ring. Older blocks have lower numbers."""
        behind = starts - self.tail
        if self.wrap is not None:
            behind[behind < 0] += self.wrap
        return behind

    def _reserve(self, size: int) -> None:
        if size > len(self.data):
            self._memory.resize(max(size, len(self.data) * 9 // 8))

    def check(self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> None:
        """Raise an error unless all blocks lie in live ranges and none of them overlap."""
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], (starts + lengths)[order]
        inside = np.zeros(len(starts), dtype=np.bool_)
        for low, high in self._live_ranges:
            inside |= (starts >= low) & (starts <= high) & (ends <= high)  # ends may have overflowed
        if not inside.all():
            first = int(inside.argmin())
            raise CorruptDataError(
                f"A record at the bytes {starts[first]} to {ends[first]} lies outside the live ranges "
                f"{self._live_ranges}."
            )
        if (ends[:-1] > starts[1:]).any():
            first = int((ends[:-1] > starts[1:]).argmax())
            raise CorruptDataError(
                f"Records overlap: one ends at byte {ends[first]}, the next starts at byte {starts[first + 1]}."
            )

    @property
    def _live_ranges(self) -> list[tuple[int, int]]:
        if self.wrap is None:
            return [(self.tail, self.head)]
        return [(0, self.head), (self.tail, self.wrap)]

    def state(self) -> State:
        """Live bytes keep their offsets. Dead bytes are left out."""
        if not self.live_bytes:
            return {"head": 0, "tail": 0, "wrap": None, "bytes": PartOfBytes(self.data[:0], [])}
        end = self.head if self.wrap is None else self.wrap
        live = PartOfBytes(self.data[:end], self._live_ranges)
        return {"head": self.head, "tail": self.tail, "wrap": self.wrap, "bytes": live}

    def restore(self, state: SavedState) -> None:
        self.limit = self._restore_bytes(state)
        self.head = state.integer("head", 0, self.limit)
        self.tail = state.integer("tail", 0, self.limit)
        self.wrap = state.integer("wrap", self.tail, self.limit) if state.has("wrap") else None
        if self.head < self.tail if self.wrap is None else self.head >= self.tail:
            raise state.error("head", f"and tail cannot be {self.head} and {self.tail}")

    def _restore_bytes(self, state: SavedState) -> int:
        """Restore the bytes, and return how many there are."""
        self._memory, size = saved_memory(state, "bytes", _SMALLEST_STEP)
        return size
