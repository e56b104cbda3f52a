"""Memory for sampled batches.

A batch of images is megabytes. Fresh memory of that size costs a page fault per 4 kB when it is first written, as much
as decoding into it, so the memory of earlier batches is used again, as soon as nobody holds an array, a tensor or a
view of it any more.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

_KEPT_BLOCKS = 3
_SMALLEST_BLOCK = 1 << 16
# What getrefcount says of a block that only the pool knows: the list, the loop variable, and its own argument.
_UNUSED = 3


class _Block(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes that batches are cut from. A class of its own, so that a batch can be told from other arrays."""

    copied: th.cuda.Event | None = None
    """Set while a copy to the GPU may still be reading the block."""
    memory: th.Tensor | None = None
    """Owns the bytes, where they are pinned."""


class OutputPool:
    """Hands out arrays, and turns them into tensors without a copy on the CPU, with one asynchronous copy on CUDA."""

    device = th.device("cpu")
    """Where the buffer's batches go: the only place that knows."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: th.device) -> npt.NDArray[Any]:
        """An uninitialised array."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALLEST_BLOCK and device.type == "cpu":
            return _as_array(_Block(size, dtype=np.uint8), shape, dtype)
        block = self._reusable(size)
        if block is None:
            # A buffer may be told to send its batches to a GPU that is not here: its arrays can be read nevertheless.
            block = _new_block(size, pinned=device.type == "cuda" and th.cuda.is_available())
            self._blocks = [*self._blocks[-_KEPT_BLOCKS + 1 :], block]
        return _as_array(block, shape, dtype)

    def _reusable(self, size: int) -> _Block | None:
        for block in self._blocks:
            if (
                len(block) == size
                and sys.getrefcount(block) == _UNUSED
                and (block.copied is None or block.copied.query())  # type: ignore[no-untyped-call]
            ):
                block.copied = None
                return block
        return None

    @staticmethod
    def to_tensor(array: npt.NDArray[Any], device: th.device) -> th.Tensor | None:
        """An array of :meth:`take` as a tensor, or ``None`` for any other array."""
        if not isinstance(array.base, _Block):
            return None
        tensor = th.from_numpy(array)
        if device.type == "cpu":
            return tensor
        tensor = tensor.to(device, non_blocking=True)
        if device.type == "cuda":
            array.base.copied = th.cuda.Event()  # type: ignore[no-untyped-call]
            array.base.copied.record(th.cuda.current_stream(device))
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(len(block) for block in self._blocks)

    def __getstate__(self) -> dict[str, Any]:
        return {"_blocks": [], "device": self.device}


def _new_block(size: int, pinned: bool) -> _Block:
    if not pinned:
        return _Block(size, dtype=np.uint8)
    memory = th.empty(size, dtype=th.uint8, pin_memory=True)
    # Through ctypes: NumPy would skip the block, and note the tensor's own array, as what batches are views of.
    block = _Block(size, dtype=np.uint8, buffer=memoryview((ctypes.c_ubyte * size).from_address(memory.data_ptr())))
    block.memory = memory
    return block


def _as_array(block: _Block, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.ndarray(shape, dtype, buffer=block)
