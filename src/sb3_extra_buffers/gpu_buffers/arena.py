"""Packed bytes with a limit, in host memory and on a torch device.

:class:`RawBuffer` is memory on a device that can grow. The arenas are the ring of
:class:`~sb3_extra_buffers.storage.arena.Arena` with a limit, and on such memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.errors import CapacityError
from sb3_extra_buffers.gpu_buffers.transfer import CPU, copy_into, to_device
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import SavedState
from sb3_extra_buffers.storage.arena import Arena
from sb3_extra_buffers.storage.frame_store import FrameStore, numbers_from

_SMALLEST_STEP = 1 << 16
_LARGE = 20 << 20
"""From this size on torch's allocator asks CUDA for a piece of exactly the size that is wanted."""
_MOVED_AT_ONCE = 1 << 24


class _OwnPool:
    """A part of torch's allocator that serves one piece of memory, and returns it to CUDA when that is freed.

    Memory that grows leaves one piece after the other behind, each a little too small for the next. Torch would keep
    all of them, which add up to many times what is in use.
    """

    def __init__(self) -> None:
        self.pool = th.cuda.MemPool()
        self._process = os.getpid()

    def __del__(self) -> None:
        if self._process != os.getpid():
            # In a forked child there is no device that could be given anything back: the pool must stay for ever.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.pool))


class RawBuffer:
    """Uninitialised bytes in a ``torch.UntypedStorage``."""

    def __init__(self, size: int, device: th.device | str = CPU) -> None:
        self.device = th.device(device)
        storage, pool = _allocate(size, self.device)
        self.storage: th.UntypedStorage = storage
        self.bytes = _view(storage)
        """All of it as a tensor."""
        # Assigned last, because attributes are freed in this order, and a pool returns unused memory when it is freed.
        self._pools = [pool]

    def __len__(self) -> int:
        return self.storage.nbytes()

    def resize(self, size: int) -> None:
        """Make it larger or smaller. What fits keeps its place."""
        self.move(size, ((0, 0, min(size, len(self))),))

    def move(self, size: int, parts: tuple[tuple[int, int, int], ...]) -> None:
        """Start anew with ``size`` bytes, of which ``parts``, given as (from, to, length), come from the old ones."""
        moved = RawBuffer(size, self.device)
        for source, target, length in parts:
            moved.bytes[target : target + length].copy_(self.bytes[source : source + length], non_blocking=True)
        self._become(moved)

    def to(self, device: th.device | str) -> None:
        """Move all bytes to another device."""
        moved = RawBuffer(len(self), device)
        moved.bytes.copy_(self.bytes)
        self._become(moved)

    def _become(self, other: RawBuffer) -> None:
        # Others may still have tensors of the old memory, so its pool stays until they say that they have not.
        self._pools += other._pools
        self.bytes, self.storage, self.device = other.bytes, other.storage, other.device

    def return_old_memory(self) -> None:
        """Free the memory from before the last move. Nothing may use the old :attr:`bytes` any more."""
        if len(self._pools) > 1:
            self._pools = self._pools[-1:]


class HeapBudget:
    """What all arenas of a buffer may take together; with ``limit=None`` as much as they need."""

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

    def __init__(self, budget: HeapBudget) -> None:
        super().__init__()
        self.budget = budget
        self.generation = 0
        """Grows when blocks move to other places."""

    @property
    def size(self) -> int:
        """Memory taken."""
        return self.limit

    def grow(self, size: int) -> tuple[int, int]:
        end = self.limit if self.wrap is None else self.wrap
        missing = self._missing(size)
        wanted = max(size + 1, self.limit // 64, _SMALLEST_STEP)
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
        """Take memory for ``size`` bytes, and move what is live from ``boundary`` on by ``shift`` bytes."""
        self._reserve(size)
        if shift:
            data, end = self.data, size - shift
            data[boundary + shift : end + shift] = data[boundary:end]

    def close_gaps(self, starts: Indices, lengths: Indices) -> None:
        """Move the blocks at ``starts``, given in the order in which they were written, to the beginning, side by side.

        Everything else is dead from then on.
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
        """The longest block that fits now, or would after growing as far as allowed."""
        if self.wrap is not None:
            return int(self.tail - self.head - 1 + self.size + self.budget.left - self.wrap)
        return int(max(self.size + self.budget.left - self.head, self.tail - 1))

    def _missing(self, size: int) -> int:
        """How many bytes more are needed before ``size`` bytes can be allocated."""
        if self.wrap is not None:
            return self.head + size + 1 - self.tail
        if size < self.tail:
            return 0
        return self.head + size - self.limit


class CappedFrameStore(FrameStore):
    """A frame store whose arena has a limit."""

    arena: CappedArena

    def allocate(self, size: int, oldest: Callable[[], Indices]) -> int:
        with uninterrupted():  # records that move, and the index that tells where they are, change together
            try:
                return super().allocate(size, oldest)
            except CapacityError:
                if not self._close_gaps(size):
                    raise
                return super().allocate(size, oldest)

    def _close_gaps(self, size: int) -> bool:
        """Make room by moving live records together, if that gives ``size`` bytes; says whether it did.

        Gaps come about where lanes differ: one whose picture never changes keeps its records, and all that other lanes
        wrote after them.
        """
        counts = self.encoded // self.codec.frames_per_record - self.first_records
        lanes, numbers = numbers_from(self.first_records, counts)
        places = lanes * self.starts.shape[1] + numbers % self.starts.shape[1]
        starts, lengths = self.starts.reshape(-1)[places], self.lengths.reshape(-1)[places].astype(np.int64)
        # What is gained must last for a while: moving everything takes time.
        if not len(lanes) or self.arena.live_bytes - int(lengths.sum()) < max(size, self.arena.limit // 16):
            return False
        order = np.argsort(self.arena.distance(starts), kind="stable")
        self.arena.close_gaps(starts[order], lengths[order])
        self.starts.reshape(-1)[places[order]] = np.cumsum(lengths[order]) - lengths[order]
        return True


class DeviceArena(CappedArena):
    """An arena on ``device``. Kernels write to it and read from it."""

    def __init__(self, device: th.device, budget: HeapBudget) -> None:
        super().__init__(budget)
        self._heap = RawBuffer(0, device)

    @property
    def heap(self) -> th.Tensor:
        """All bytes, of which only what lies between tail and head means something."""
        return self._heap.bytes

    @property
    def data(self) -> Bytes:
        """A copy on the host, for which the device must be waited for."""
        copy: Bytes = self.heap.cpu().numpy()
        return copy

    @property
    def size(self) -> int:
        return len(self._heap)

    def return_old_memory(self) -> None:
        """To be called when no tensor of the :attr:`heap` before it last grew is left."""
        self._heap.return_old_memory()

    def _extend(self, size: int, boundary: int, shift: int) -> None:
        upper = (boundary, boundary + shift, size - shift - boundary)
        if size > self.size:
            larger = int(min(max(size, self.size * 9 // 8), self.size + self.budget.left))
            if shift:
                self._heap.move(larger, ((0, 0, boundary), upper))
            else:
                self._heap.resize(larger)
        elif shift:
            self._move_up(*upper)

    def _move_up(self, source: int, target: int, length: int) -> None:
        """Move bytes to a later place that may overlap theirs: from the end on, in pieces, to take little memory."""
        between = self.heap.new_empty(min(length, _MOVED_AT_ONCE))
        for begin in reversed(range(0, length, _MOVED_AT_ONCE)):
            piece = between[: min(_MOVED_AT_ONCE, length - begin)]
            piece.copy_(self.heap[source + begin : source + begin + len(piece)])
            self.heap[target + begin : target + begin + len(piece)].copy_(piece)

    def _pack(self, starts: Indices, lengths: Indices) -> None:
        ends = np.cumsum(lengths)
        packed = self.heap.new_empty(int(ends[-1]))
        # Piece by piece, since finding each byte takes many times the memory that it does.
        for piece in np.split(np.arange(len(starts)), np.flatnonzero(np.diff(ends // _MOVED_AT_ONCE)) + 1):
            target = packed[ends[piece[0]] - lengths[piece[0]] : ends[piece[-1]]]
            target.copy_(pack_segments(self.heap, th.from_numpy(starts[piece]), th.from_numpy(lengths[piece])))
        self.heap[: len(packed)] = packed

    def _restore_bytes(self, state: SavedState) -> int:
        stored = state.array("bytes", np.uint8, (None,))
        self._heap = RawBuffer(len(stored), self._heap.device)
        copy_into(self.heap, stored)
        return len(stored)


def pack_segments(source: th.Tensor, starts: th.Tensor, lengths: th.Tensor) -> th.Tensor:
    """Copy segments of ``source``, whose places are known on the host, one after the other into a new tensor."""
    device, total = source.device, int(lengths.sum())
    shifts = to_device(starts - (lengths.cumsum(0) - lengths), device)
    shifts = shifts.repeat_interleave(to_device(lengths, device), output_size=total)
    return source[shifts + th.arange(total, device=device)]


def _allocate(size: int, device: th.device) -> tuple[Any, _OwnPool | None]:
    # Torch does not type storages. Versions before 2.5 have no pools.
    use_pool = getattr(th.cuda, "use_mem_pool", None)
    if device.type != "cuda" or size < _LARGE or use_pool is None:
        return th.UntypedStorage(size, device=device), None  # type: ignore[no-untyped-call]
    own, index = _OwnPool(), device.index
    with use_pool(own.pool, th.cuda.current_device() if index is None else index):  # type: ignore[redundant-expr]
        return th.UntypedStorage(size, device=device), own  # type: ignore[no-untyped-call]


def _view(storage: th.UntypedStorage) -> th.Tensor:
    return th.empty(0, dtype=th.uint8, device=storage.device).set_(storage)
