"""An arena that never moves bytes: for memory that is a file, and for large rings.

Live bytes are a list of *extents*, oldest first. New bytes extend the newest extent, or begin another one in a large
gap. In a buffer on disk, bytes that die are *held*, because the state of the last flush still refers to them. They are
only overwritten after :meth:`ExtentArena.release_held`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.arena import Arena
from sb3_extra_buffers.storage.memory import FileMemory, Memory, PartOfBytes, saved_memory

_SMALLEST_STEP = 1 << 20
"""The least by which a file grows, in bytes."""
_MOST_EXTENTS = 10_000
"""The most extents in a saved state that is taken for valid."""
_MOST_BYTES_TO_MOVE = 8 << 20
"""A ring that would have to move more bytes to grow becomes an extent arena. Moving this many takes about 2 ms."""

_ARENA_NAME = re.compile(r".+\.[0-9a-f]{8}\.arena", re.DOTALL)

Extent = tuple[int, int]


class ExtentArena(Arena):
    """An arena that never moves bytes, not even when it grows."""

    def __init__(self, memory: Memory | None = None) -> None:
        super().__init__()
        self._memory = memory or self._memory
        self._live: list[Extent] = []
        self._held: list[Extent] = []

    @classmethod
    def in_place_of(cls, ring: Arena) -> ExtentArena:
        """An arena that takes over the memory of ``ring``. No byte moves."""
        arena = cls(ring._memory)
        arena.limit, arena._live = ring.limit, [(start, end) for start, end in ring._live_ranges[::-1] if end > start]
        return arena

    @property
    def memory(self) -> Memory:
        return self._memory

    @property
    def live_bytes(self) -> int:
        return sum(end - start for start, end in self._live)

    @property
    def held_bytes(self) -> int:
        return sum(end - start for start, end in self._held)

    def allocate(self, size: int) -> int | None:
        gaps = self._gaps()
        if self._live:
            first, start = self._live[-1]
            if any(low == start and high - low >= size for low, high in gaps):
                self._live[-1] = (first, start + size)
                return start
        # Only large gaps are used. Small ones grow, as their neighbours die.
        start, end = max(gaps, key=lambda gap: gap[1] - gap[0], default=(0, 0))
        if end - start < max(size, self.limit // 32, 1):
            return None
        self._live.append((start, start + size))
        return start

    def grow(self, size: int) -> tuple[int, int]:
        if isinstance(self._memory, FileMemory):
            larger = self.limit + max(size, self.limit // 16, _SMALLEST_STEP)
        else:  # growing costs next to nothing
            larger = self.limit + max(size, self.limit // 64)
        if larger > len(self.data):
            self._memory.resize(larger)
        self.limit = larger
        return larger, 0

    def free_until(self, start: int) -> None:
        # Bytes are held first, and then no longer live: an interruption in between only keeps them longer.
        while self._live and not self._live[0][0] <= start < self._live[0][1]:
            self._hold(*self._live[0])
            del self._live[0]
        if self._live and self._live[0][0] < start:
            first, end = self._live[0]
            self._hold(first, start)
            self._live[0] = (start, end)

    def clear(self) -> None:
        for extent in self._live:
            self._hold(*extent)
        self._live = []

    def release_held(self) -> None:
        """Let held bytes be overwritten: a flush has replaced the state that referred to them."""
        self._held = []

    def _hold(self, start: int, end: int) -> None:
        if isinstance(self._memory, FileMemory):
            self._held.append((start, end))

    def distance(self, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        behind = np.zeros_like(starts)
        before = 0
        for first, end in self._live:
            inside = (starts >= first) & (starts < end)
            behind[inside] = starts[inside] - first + before
            before += end - first
        return behind

    @property
    def _live_ranges(self) -> list[Extent]:
        return self._live

    def _gaps(self) -> list[Extent]:
        gaps, at = [], 0
        for start, end in sorted([*self._live, *self._held]):
            if start > at:
                gaps.append((at, start))
            at = max(at, end)
        return [*gaps, (at, self.limit)] if at < self.limit else gaps

    def state(self) -> State:
        end = max((end for _, end in self._live), default=0)
        name = self._memory.path.name if isinstance(self._memory, FileMemory) else None
        live = PartOfBytes(self.data[:end], self._live)
        return {"extents": list(map(list, self._live)), "limit": self.limit, "file": name, "bytes": live}

    def restore(self, state: SavedState) -> None:
        if state.has("bytes"):
            self._memory, self.limit = saved_memory(state, "bytes", _SMALLEST_STEP)
        else:
            self._memory = self._named_memory(state)
            self.limit = state.integer("limit", 0, len(self.data))
        extents = state.value("extents") if state.has("extents") else _extents_of_ring(state)
        if not isinstance(extents, list) or len(extents) > _MOST_EXTENTS:
            raise state.error("extents", "must be a list")
        self._live = [(_bound(extent, 0), _bound(extent, 1)) for extent in extents]
        at = 0
        for start, end in sorted(self._live):
            if not at <= start <= end <= self.limit:
                raise state.error("extents", f"has {start} to {end} of {self.limit} bytes, or overlaps")
            at = end

    def _named_memory(self, state: SavedState) -> FileMemory:
        """Map the file that the saved state names, in the folder of this arena's own file."""
        name = state.value("file")
        if not isinstance(self._memory, FileMemory) or not isinstance(name, str) or not is_arena_name(name):
            raise state.error("bytes", "is missing")
        path = self._memory.path.with_name(name)
        try:
            return FileMemory(path, create=False)
        except FileNotFoundError:
            raise CorruptDataError(f"{path} is missing: the buffer is not complete.") from None


def ready_to_grow(arena: Arena) -> Arena:
    """Return this arena or, if growing would move many bytes, one with the same bytes that never moves any."""
    moves = type(arena) is Arena and arena.wrap is not None and arena.wrap - arena.tail > _MOST_BYTES_TO_MOVE
    return ExtentArena.in_place_of(arena) if moves else arena


def is_arena_name(name: str) -> bool:
    """Whether this is the name of an arena's file. In an untrusted state, a name could lead out of the folder."""
    return bool(_ARENA_NAME.fullmatch(name)) and Path(name).name == name


def _extents_of_ring(state: SavedState) -> list[list[int]]:
    """The extents of a saved :class:`.Arena`, oldest first."""
    head, tail = state.integer("head"), state.integer("tail")
    if not state.has("wrap"):
        return [[tail, head]] if head != tail else []
    return [[tail, state.integer("wrap")], [0, head]] if head else [[tail, state.integer("wrap")]]


def _bound(extent: Any, which: int) -> int:
    """The start (0) or end (1) of a saved extent; -1 if it is not valid."""
    value = extent[which] if isinstance(extent, list) and len(extent) == 2 else None
    return value if type(value) is int else -1
