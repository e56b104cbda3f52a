"""Bytes on a torch device.

:class:`RawBuffer` is memory that can grow. :class:`SharedRawHeap` keeps many cells of any length packed in one of them.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch as th

from sb3_extra_buffers.errors import CapacityError, ConfigurationError
from sb3_extra_buffers.gpu_buffers.transfer import CPU, to_device

_LARGE = 20 << 20
"""From this size on torch's allocator asks CUDA for a piece of exactly the size that is wanted."""


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
        # After what it serves, because attributes go in this order: a pool returns what nobody uses when it goes.
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
        """Nobody has :attr:`bytes` from before the last move any more, so that memory can go back to the device."""
        if len(self._pools) > 1:
            self._pools = self._pools[-1:]


class SharedRawHeap:
    """Cells of any length, back to back in one :class:`RawBuffer`.

    A cell that is written again leaves its old bytes behind as a hole. Holes are closed when room is needed, before the
    heap grows, and by :meth:`compact`. Where cells lie is kept on the host, so that no operation waits for the device.

    :param heap_bytes: The most that the heap may take. By default it grows as needed.
    """

    def __init__(self, n_cells: int, device: th.device | str = CPU, heap_bytes: int | None = None) -> None:
        if n_cells < 1 or (heap_bytes is not None and heap_bytes < 1):
            raise ConfigurationError(f"A heap needs cells and bytes, not {n_cells} and {heap_bytes}.")
        self.heap_bytes = heap_bytes
        self.raw = RawBuffer(0, device)
        self.start_idx = th.zeros(n_cells, dtype=th.int64)
        """Where each cell starts."""
        self.lengths = th.zeros(n_cells, dtype=th.int64)
        """The bytes in each cell; 0 where nothing was written."""
        self.data_end = 0
        """Everything from here on is free."""

    @property
    def live_bytes(self) -> int:
        return int(self.lengths.sum())

    def write(self, cell: int, payload: th.Tensor) -> None:
        """Replace what is in a cell by the bytes of ``payload``, a tensor of ``uint8`` on any device."""
        size = payload.numel()
        if self.data_end + size > len(self.raw):
            self._make_room(cell, size)
        self.raw.bytes[self.data_end : self.data_end + size].copy_(payload.reshape(-1), non_blocking=True)
        self.start_idx[cell] = self.data_end
        self.lengths[cell] = size
        self.data_end += size

    def read(self, cell: int) -> th.Tensor:
        """The bytes of a cell, a view that is good until the next write."""
        start = int(self.start_idx[cell])
        return self.raw.bytes[start : start + int(self.lengths[cell])]

    def free(self, cell: int) -> None:
        self.lengths[cell] = 0

    def compact(self, size: int | None = None) -> None:
        """Close all holes. The heap then has ``size`` bytes, by default as many as are alive."""
        order = self.start_idx.argsort(stable=True)
        lengths = self.lengths[order]
        ends = lengths.cumsum(0)
        packed = pack_segments(self.raw.bytes, self.start_idx[order], lengths)
        self.start_idx[order] = ends - lengths
        self.data_end = packed.numel()
        self.raw = RawBuffer(max(size or 0, self.data_end), self.raw.device)
        self.raw.bytes[: self.data_end] = packed

    def _make_room(self, cell: int, size: int) -> None:
        """For ``size`` bytes that will replace those of ``cell``. Nothing changes if there is not enough."""
        old_length = int(self.lengths[cell])
        needed = self.live_bytes - old_length + size
        limit = self.heap_bytes
        if limit is not None and needed > limit:
            raise CapacityError(
                f"The heap is full: {size:,} bytes are needed, {limit - (needed - size):,} of heap_bytes={limit:,} are "
                "available. Pass more heap_bytes."
            )
        self.lengths[cell] = 0
        wanted = max(needed, len(self.raw) * 9 // 8)
        self.compact(wanted if limit is None else min(wanted, limit))


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
