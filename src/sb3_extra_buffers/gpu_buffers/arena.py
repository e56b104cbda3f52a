"""Arenas with a memory limit, in host memory and on a torch device. See :mod:`sb3_extra_buffers.storage.arena`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch as th

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.errors import CapacityError
from sb3_extra_buffers.gpu_buffers.driver import DeviceMemory
from sb3_extra_buffers.gpu_buffers.transfer import copy_into, to_device
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import SavedState
from sb3_extra_buffers.storage.arena import Arena
from sb3_extra_buffers.storage.frame_store import FrameStore

_SMALLEST_STEP = 1 << 16
"""The unit of the smallest growth of an arena, in bytes."""
_MOVED_AT_ONCE = 1 << 24
"""Bytes that are copied at a time when live bytes move on the device. This limits the temporary memory."""


class HeapBudget:
    """The memory limit that all arenas of a buffer share, in bytes; ``None`` for no limit."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.arenas: dict[int, CappedArena] = {}
        """The arena of each store, by the store's ``id``."""

    @property
    def taken(self) -> int:
        return sum(arena.size for arena in self.arenas.values())

    @property
    def left(self) -> float:
        return float("inf") if self.limit is None else self.limit - self.taken


class CappedArena(Arena):
    """An arena in host memory that grows no further than its budget allows."""

    _growth_divisor = 64
    """The arena grows by its size divided by this number, or by the smallest growth if that is more."""
    _smallest_growth = 1
    """The smallest growth, in units of ``_SMALLEST_STEP``."""

    def __init__(self, budget: HeapBudget) -> None:
        super().__init__()
        self.budget = budget
        self.generation = 0
        """A counter that increases whenever blocks move."""

    @property
    def size(self) -> int:
        """The memory that counts against the budget, in bytes."""
        return self.limit

    def grow(self, size: int) -> tuple[int, int]:
        end = self.limit if self.wrap is None else self.wrap
        missing = self._missing(size)
        wanted = max(size + 1, self.limit // self._growth_divisor, self._smallest_growth * _SMALLEST_STEP)
        step = int(min(wanted, self.size + self.budget.left - end))
        if step < missing:
            raise CapacityError(
                f"The heap is full: {size:,} bytes are needed, {self._available:,} of heap_bytes={self.budget.limit:,} "
                "are available. Pass more heap_bytes."
            )
        if step < wanted and missing <= 0:
            return self.limit, 0
        if self.wrap is None:
            self._extend(end + step, 0, 0)
            self.limit += step
            return self.limit, 0
        boundary = self.tail
        self._extend(end + step, boundary, step)
        self.tail += step
        self.wrap += step
        self.limit = max(self.limit, self.wrap)
        self.generation += 1
        return boundary, step

    def _extend(self, size: int, boundary: int, shift: int) -> None:
        """Extend the memory to ``size`` bytes, and move the live bytes from ``boundary`` on up by ``shift`` bytes."""
        self._reserve(size)
        if shift:
            data, end = self.data, size - shift
            data[boundary + shift : end + shift] = data[boundary:end]

    def close_gaps(self, starts: Indices, lengths: Indices) -> None:
        """Pack blocks at the beginning of the arena, without gaps. All other bytes become dead.

        :param starts: Where the blocks start, in the order in which they were written.
        """
        self._pack(starts, lengths)
        self.head, self.tail, self.wrap = int(lengths.sum()), 0, None
        self.generation += 1

    def _pack(self, starts: Indices, lengths: Indices) -> None:
        data = self.data
        packed = [data[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        data[: int(lengths.sum())] = np.concatenate(packed)

    @property
    def _available(self) -> int:
        """The size of the longest block that fits now, or after growing as far as the budget allows."""
        if self.wrap is not None:
            return int(self.tail - self.head - 1 + self.size + self.budget.left - self.wrap)
        return int(max(self.size + self.budget.left - self.head, self.tail - 1))

    def _missing(self, size: int) -> int:
        """How many bytes the arena must grow before ``size`` bytes can be allocated."""
        if self.wrap is not None:
            return self.head + size + 1 - self.tail
        if size < self.tail:
            return 0
        return self.head + size - self.limit


class CappedFrameStore(FrameStore):
    """A frame store whose arena has a limit."""

    arena: CappedArena

    def allocate(self, size: int, oldest: Callable[[], Indices]) -> int:
        with uninterrupted():  # records and the index, which says where they are, change together
            try:
                return super().allocate(size, oldest)
            except CapacityError:
                if not self._close_gaps(size):
                    raise
                return super().allocate(size, oldest)

    def _close_gaps(self, size: int) -> bool:
        """Pack live records if that frees at least ``size`` bytes; return whether it did.

        Gaps arise because the arena only frees its oldest bytes. A lane whose images never change writes nothing, so
        its old records stay live, and dead records of other lanes after them cannot be freed.
        """
        places = self.index.places(*self.live_records())
        starts, lengths, _ = self.index.entries(places)
        # Moving all records takes time, so it must free enough to last for a while.
        if not len(places) or self.arena.live_bytes - int(lengths.sum()) < max(size, self.arena.limit // 16):
            return False
        order = np.argsort(self.arena.distance(starts), kind="stable")
        self.arena.close_gaps(starts[order], lengths[order])
        self.index.starts.put(places[order], np.cumsum(lengths[order]) - lengths[order])
        return True


class DeviceArena(CappedArena):
    """An arena in the memory of ``device``, where kernels write and read records."""

    _growth_divisor = 128
    _smallest_growth = 8

    def __init__(self, device: th.device, budget: HeapBudget) -> None:
        super().__init__(budget)
        self._heap = DeviceMemory(device)

    @property
    def heap(self) -> th.Tensor:
        """All bytes. Only those between tail and head are live."""
        return self._heap.bytes

    @property
    def data(self) -> Bytes:
        """A copy on the host. Waits for the device."""
        copy: Bytes = self.heap.cpu().numpy()
        return copy

    @property
    def size(self) -> int:
        return len(self._heap)

    def discard_dead(self) -> None:
        """Do nothing: a part of a tensor cannot be freed."""

    def _extend(self, size: int, boundary: int, shift: int) -> None:
        if size > self.size:
            self._heap.grow(size)
        if shift:
            self._move_up(boundary, boundary + shift, size - shift - boundary)

    def _move_up(self, source: int, target: int, length: int) -> None:
        """Move bytes up. Source and target may overlap, so pieces are moved one by one, the last one first."""
        between = self.heap.new_empty(min(length, _MOVED_AT_ONCE))
        for begin in reversed(range(0, length, _MOVED_AT_ONCE)):
            piece = between[: min(_MOVED_AT_ONCE, length - begin)]
            piece.copy_(self.heap[source + begin : source + begin + len(piece)])
            self.heap[target + begin : target + begin + len(piece)].copy_(piece)

    def _pack(self, starts: Indices, lengths: Indices) -> None:
        ends = np.cumsum(lengths)
        packed = self.heap.new_empty(int(ends[-1]))
        # In pieces, because the index of each byte takes many times the memory of the byte.
        for piece in np.split(np.arange(len(starts)), np.flatnonzero(np.diff(ends // _MOVED_AT_ONCE)) + 1):
            target = packed[ends[piece[0]] - lengths[piece[0]] : ends[piece[-1]]]
            target.copy_(pack_segments(self.heap, th.from_numpy(starts[piece]), th.from_numpy(lengths[piece])))
        self.heap[: len(packed)] = packed

    def _restore_bytes(self, state: SavedState) -> int:
        stored = state.array("bytes", np.uint8, (None,))
        self._heap = DeviceMemory(self.heap.device)
        self._heap.grow(len(stored))
        copy_into(self.heap, stored)
        return len(stored)


def pack_segments(source: th.Tensor, starts: th.Tensor, lengths: th.Tensor) -> th.Tensor:
    """Copy segments of ``source`` one after the other into a new tensor. ``starts`` and ``lengths`` are on the host."""
    device, total = source.device, int(lengths.sum())
    shifts = to_device(starts - (lengths.cumsum(0) - lengths), device)
    shifts = shifts.repeat_interleave(to_device(lengths, device), output_size=total)
    return source[shifts + th.arange(total, device=device)]
