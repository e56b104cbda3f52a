"""Memory for sampled batches.

A batch of images has megabytes. Fresh memory of that size costs a page fault per 4 kB when it is first written, which
takes as long as decoding into it. So a pool keeps a few *blocks* of memory and reuses them.

A *lease* decides whether a block is in use. Every array that the pool hands out is a view of a lease of its own, and
the pool only has a weak reference to that lease. Whatever can access the memory of a batch (the array, its views and
memoryviews, tensors made from it and their views) keeps the array's base alive, which is the lease. Once the lease is
gone, nothing can access the block, and it is free. NumPy's arrays take no part in garbage collection, so a lease that
one of them holds cannot be collected early, not even in a cycle.
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.storage import shared_memory
from sb3_extra_buffers.storage.shared_memory import Address, SharedMemory

_KEPT_BLOCKS = 4
"""Enough for the observations and next observations of a batch, and of the previous one, which a training loop often
still holds."""
_SMALLEST_BLOCK = 1 << 16
"""In bytes. For smaller batches on the CPU, fresh memory is as good."""
ALIGNMENT = 64
"""In bytes, as in torch. JAX uses the memory of an array that is aligned like this, and copies any other array."""


_n_forks = 0
"""Counts forks. A fork does not copy shared memory, so shared blocks from before it are not reused."""


class Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """The base of an array that was handed out. A class of its own: NumPy would skip a plain array as a base."""

    block: Block | None = None
    """The block that was lent; ``None`` if the lease has memory of its own."""

    def share(self) -> Address | None:
        """Let other processes write to the memory until :meth:`release`. Before that, it is not lent again."""
        assert self.block is not None
        self.block.is_awaited = True
        return None if self.block.shared is None else self.block.shared.address

    def release(self) -> None:
        assert self.block is not None
        self.block.is_awaited = False


def _nobody() -> None:
    """Stands for the lease of a block that was never handed out."""


class Block:
    """Memory that is lent to one lease at a time."""

    def __init__(self, size: int, pinned: bool, shared: bool) -> None:
        self.size, self._n_forks = size, _n_forks
        self._memory: Any
        self.lease: Callable[[], Lease | None] = _nobody
        """The current lease, or ``None`` once it has ended."""
        self.copied: th.cuda.Event | None = None
        """Set while a copy to the GPU may still be reading the memory."""
        self.shared: SharedMemory | None = None
        self.is_awaited = False
        """Whether other processes may still write to the memory."""
        if shared:
            self.shared = SharedMemory(size)
            self._memory = self.shared.bytes.view(Lease)
        elif pinned:
            self._owner = th.empty(size, dtype=th.uint8, pin_memory=True)
            self._memory = (ctypes.c_ubyte * size).from_address(self._owner.data_ptr())
        else:
            # A plain array would become the base of the arrays that are handed out, instead of their lease.
            memory = Lease(size + ALIGNMENT, dtype=np.uint8)
            start = -memory.ctypes.data % ALIGNMENT
            self._memory = memory[start : start + size]

    def is_free(self) -> bool:
        if self.lease() is not None or self.is_awaited or (self.shared is not None and self._n_forks != _n_forks):
            return False
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def lend(self) -> Lease:
        lease = Lease(self.size, dtype=np.uint8, buffer=self._memory)
        lease.block = self  # keeps the memory, even if the pool drops the block
        self.lease, self.copied = weakref.ref(lease), None
        return lease


class OutputPool:
    """Hands out arrays, and turns them into tensors: on the CPU without a copy, on CUDA with one asynchronous copy."""

    device = th.device("cpu")
    """Where the buffer's batches go. No other object stores it."""

    def __init__(self, kept: int = _KEPT_BLOCKS, shared: bool = False) -> None:
        self._blocks: list[Block] = []
        self._kept, self._shared = kept, shared and shared_memory.IS_AVAILABLE

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: th.device) -> npt.NDArray[Any]:
        """An uninitialised array. The caller must hold the buffer's lock."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALLEST_BLOCK and device.type == "cpu":
            return np.ndarray(shape, dtype, buffer=Lease(size, dtype=np.uint8))
        return np.ndarray(shape, dtype, buffer=self.lend(size, device))

    def lend(self, size: int, device: th.device) -> Lease:
        """Lend memory for several arrays. Each of them keeps it in use."""
        for block in self._blocks:
            if block.size == size and block.is_free():
                break
        else:
            # The device may be a GPU that this machine does not have: arrays can be read nevertheless.
            pinned = device.type == "cuda" and th.cuda.is_available()
            block = Block(size, pinned, self._shared)
            n_dropped = max(len(self._blocks) - self._kept + 1, 0)
            for dropped in self._blocks[:n_dropped]:
                if dropped.shared is not None:
                    dropped.shared.close()
            self._blocks = [*self._blocks[n_dropped:], block]
        return block.lend()

    @staticmethod
    def to_tensor(array: npt.NDArray[Any], device: th.device) -> th.Tensor | None:
        """Turn an array of :meth:`take` into a tensor. Returns ``None`` for any other array."""
        lease = array.base
        if not isinstance(lease, Lease):
            return None
        tensor = th.from_numpy(array)
        if device.type == "cpu":
            return tensor
        if device.type != "cuda" or lease.block is None:
            return tensor.to(device, non_blocking=True)
        with uninterrupted():  # a block whose copy has begun must not look free
            moved = tensor.to(device, non_blocking=True)
            lease.block.copied = th.cuda.Event()  # type: ignore[no-untyped-call]
            lease.block.copied.record(th.cuda.current_stream(device))
        return moved

    @property
    def nbytes(self) -> int:
        return sum(block.size for block in self._blocks)


def _after_fork() -> None:
    global _n_forks
    _n_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_after_fork, after_in_child=_after_fork)
