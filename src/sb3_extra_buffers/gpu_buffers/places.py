"""The numbers that a sample sends to the device: where its observations are."""

from __future__ import annotations

import functools
import math
import threading

import numpy as np
import torch as th

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.gpu_buffers.transfer import to_device

_BLOCKS = 16


class _Block:
    """Pinned host memory for the numbers of one batch."""

    def __init__(self, memory: th.Tensor) -> None:
        self._memory = memory
        self.tensor = memory
        self.array: Indices = memory.numpy()

    def shaped(self, shape: tuple[int, int]) -> _Block:
        if self.tensor.shape != shape:
            self.tensor = self._memory[: math.prod(shape)].view(shape)
            self.array = self.tensor.numpy()
        return self


class _Rotation:
    """Blocks that kernels read where they are, used in turns, chunk by chunk.

    An event marks the end of a chunk, which costs less than one for each block would. A rotation serves one stream: an
    event says nothing about others. Where the device is far behind, chunks are added, so that nobody waits for it.
    """

    def __init__(self, device: th.device, block_size: int) -> None:
        self._device = device
        self._block_size = block_size
        self._lock = threading.Lock()
        self._chunks: list[tuple[list[_Block], th.cuda.Event]] = []
        self._chunk = 0
        self._place = _BLOCKS

    def take(self, shape: tuple[int, int]) -> _Block:
        with self._lock:
            if self._place == _BLOCKS:
                self._next_chunk()
            block = self._chunks[self._chunk][0][self._place].shaped(shape)
            self._place += 1
        return block

    def _next_chunk(self) -> None:
        if self._chunks:
            self._chunks[self._chunk][1].record(th.cuda.current_stream(self._device))
            self._chunk = (self._chunk + 1) % len(self._chunks)
        if not self._chunks or not self._chunks[self._chunk][1].query():  # type: ignore[no-untyped-call]
            memory = th.empty((_BLOCKS, self._block_size), dtype=th.int64, pin_memory=True)
            chunk = [_Block(part) for part in memory.unbind(0)], th.cuda.Event()  # type: ignore[no-untyped-call]
            self._chunks.insert(self._chunk, chunk)
        self._place = 0


@functools.cache
def _rotation(device: th.device, stream: int, block_size: int) -> _Rotation:
    return _Rotation(device, block_size)


def _host_memory(shape: tuple[int, int], device: th.device) -> tuple[th.Tensor, Indices]:
    if device.type != "cuda":
        array = np.empty(shape, dtype=np.int64)
        return th.from_numpy(array), array
    stream = th._C._cuda_getCurrentRawStream(device.index)
    block = _rotation(device, stream, 1 << math.prod(shape).bit_length()).take(shape)
    return block.tensor, block.array


class Places:
    """Slots and environments of a batch, known to both sides.

    :param slots: For each column to be read, the slots.
    :param more: Numbers that travel along.
    """

    def __init__(self, slots: list[Indices], envs: Indices, device: th.device, more: tuple[Indices, ...] = ()) -> None:
        self.slots = slots
        self.envs = envs
        self.device = device
        self.for_kernels, array = _host_memory((len(slots) + 1 + len(more), len(envs)), device)
        """The numbers, ``int64``, where kernels can read them without waiting for a copy."""
        for row, numbers in enumerate((*slots, envs, *more)):
            array[row] = numbers

    def __len__(self) -> int:
        return len(self.envs)

    @functools.cached_property
    def tensor(self) -> th.Tensor:
        """The same on the device: the slots of each column, the environments, and what there is more."""
        return to_device(self.for_kernels, self.device)

    @property
    def env_tensor(self) -> th.Tensor:
        return self.tensor[len(self.slots)]
