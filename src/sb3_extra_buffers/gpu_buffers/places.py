"""The numbers that a sample sends to the device: where its observations are."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import weakref
from collections import deque

import numpy as np
import torch as th

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.gpu_buffers.transfer import to_device
from sb3_extra_buffers.interruption import uninterrupted

_BLOCKS = 16


class _Memory:
    """Pinned host memory for the numbers of one batch."""

    def __init__(self, memory: th.Tensor) -> None:
        self._memory = memory
        self.tensor = memory
        self.array: Indices = memory.numpy()

    def shape(self, shape: tuple[int, int]) -> None:
        if self.tensor.shape != shape:
            self.tensor = self._memory[: math.prod(shape)].view(shape)
            self.array = self.tensor.numpy()


class _Block:
    """Memory that is somebody's, until nobody has the block any more."""

    __slots__ = ("__weakref__", "array", "tensor")

    def __init__(self, memory: _Memory) -> None:
        self.tensor = memory.tensor
        self.array = memory.array


class _Loan(weakref.ref[_Block]):
    """Notices when nobody has a block any more, and so not before the kernel that reads it was launched."""

    memory: _Memory | None = None
    """``None`` if Ctrl-C came before the loan was complete, and so before any kernel read the memory."""
    # As objects: a weak reference has no hash of its own once its block is gone.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class _Rotation:
    """Memory that kernels read where it is.

    What comes back may still be read by the device. An event for several blocks tells when it no longer is, which costs
    less than one for each would. A rotation serves one stream: an event says nothing about others. Where the device is
    far behind, memory is added, so that nobody waits for it.
    """

    def __init__(self, device: th.device, block_size: int) -> None:
        self._stream = th.cuda.current_stream(device)
        self._block_size = block_size
        self._lock = threading.Lock()
        self._ready: deque[_Memory] = deque()
        self._out: set[_Loan] = set()
        self._returned: deque[_Loan] = deque()
        self._in_use: deque[tuple[th.cuda.Event, list[_Memory]]] = deque()
        """What the device may be reading, oldest first, and the event after which it no longer does."""

    def take(self, shape: tuple[int, int]) -> _Block:
        try:
            memory = self._ready.popleft()
        except IndexError:
            with uninterrupted(), self._lock:
                memory = self._more()
        memory.shape(shape)
        block = _Block(memory)
        # No Python code runs when it comes back, which may be at any point of any thread.
        loan = _Loan(block, self._returned.append)
        loan.memory = memory
        self._out.add(loan)
        return block

    def mark(self) -> th.cuda.Event:
        """An event after everything that has been launched so far."""
        event = th.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _more(self) -> _Memory:
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        self._out.difference_update(returned)
        read = [loan.memory for loan in returned if loan.memory is not None]
        if read:
            self._in_use.append((self.mark(), read))
        if self._in_use and self._in_use[0][0].query():  # type: ignore[no-untyped-call]
            free = self._in_use.popleft()[1]
        else:
            memory = th.empty((_BLOCKS, self._block_size), dtype=th.int64, pin_memory=True)
            free = [_Memory(part) for part in memory.unbind(0)]
        first = free.pop()
        self._ready.extend(free)
        return first


_closed: deque[tuple[th.cuda.Event, _Rotation]] = deque()
"""Memory of buffers that are gone, until the device has read it."""


class HostBlocks:
    """Pinned memory for the batches of one buffer, by size and stream. It goes with the buffer."""

    def __init__(self) -> None:
        self._rotations: dict[tuple[int | None, int, int], _Rotation] = {}
        self._process = os.getpid()
        while _closed and _closed[0][0].query():  # type: ignore[no-untyped-call]
            _closed.popleft()

    def take(self, shape: tuple[int, int], device: th.device) -> _Block:
        stream = th._C._cuda_getCurrentRawStream(device.index)
        key = device.index, stream, 1 << math.prod(shape).bit_length()
        rotation = self._rotations.get(key)
        if rotation is None:
            rotation = self._rotations[key] = _Rotation(device, key[2])
        return rotation.take(shape)

    def __del__(self) -> None:
        if self._process == os.getpid():  # a forked child has no device
            with contextlib.suppress(Exception):  # nor has an interpreter that is shutting down
                _closed.extend((rotation.mark(), rotation) for rotation in self._rotations.values())

    def __reduce__(self) -> tuple[type[HostBlocks], tuple[()]]:
        return HostBlocks, ()


_shared = HostBlocks()


class Places:
    """Slots and environments of a batch, known to both sides.

    :param slots: For each column to be read, the slots.
    :param blocks: Where pinned memory for them comes from.
    """

    def __init__(self, slots: list[Indices], envs: Indices, device: th.device, blocks: HostBlocks = _shared) -> None:
        self.slots = slots
        self.envs = envs
        self.device = device
        shape = (len(slots) + 1, len(envs))
        self._block: _Block | None = None
        if device.type == "cuda":
            self._block = block = blocks.take(shape, device)
            self.for_kernels, array = block.tensor, block.array
        else:
            array = np.empty(shape, dtype=np.int64)
            self.for_kernels = th.from_numpy(array)
        """The numbers, ``int64``, where kernels can read them without waiting for a copy."""
        for row, numbers in enumerate((*slots, envs)):
            array[row] = numbers

    def __len__(self) -> int:
        return len(self.envs)

    @functools.cached_property
    def tensor(self) -> th.Tensor:
        """The same on the device: the slots of each column, and the environments."""
        return to_device(self.for_kernels, self.device)

    @property
    def env_tensor(self) -> th.Tensor:
        return self.tensor[len(self.slots)]
