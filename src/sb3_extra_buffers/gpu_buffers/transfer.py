"""Copies between host and device that do not wait for the device.

Bytes for a GPU pass through pinned memory. Torch's allocator for pinned memory tracks which copies still read a block,
and reuses the block only after them. Data that is sent in every step or batch has pinned memory of its own instead
(:class:`Staging`), because allocating takes longer than sending.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.gpu_buffers.driver import copy_to_device, has_driver
from sb3_extra_buffers.storage.stacking import MemoryForm, StackLayout

CPU = th.device("cpu")
COUNT_MASK = (1 << 31) - 1
"""Kernels get counts of observations modulo 2**31, so that they fit into a signed 32-bit integer."""
_STAGING_BYTES = 2 << 20
"""The size of all rows of a :class:`Staging`, in bytes: small enough for the processor's cache. Two rows always fit."""
_MOST_ROWS = 1024
"""The most rows of a :class:`Staging`. With many rows, the host seldom has to check how far the device is."""
_ALIGNMENT = 64
"""The sizes of rows are rounded up to a multiple of this many elements."""

_DTYPES = {
    "u1": th.uint8,
    "b1": th.bool,
    "i1": th.int8,
    "i2": th.int16,
    "i4": th.int32,
    "i8": th.int64,
    "f2": th.float16,
    "f4": th.float32,
    "f8": th.float64,
    "u2": th.uint16,
    "u4": th.uint32,
    "u8": th.uint64,
}


def torch_dtype(dtype: npt.DTypeLike) -> th.dtype:
    """The torch dtype with the same bits."""
    return _DTYPES[np.dtype(dtype).str[1:]]


def pinned(shape: tuple[int, ...], dtype: th.dtype, device: th.device) -> th.Tensor:
    """Allocate uninitialised host memory from which :func:`to_device` copies in the background."""
    return th.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(tensor: th.Tensor, device: th.device) -> th.Tensor:
    """Copy a tensor from the host to ``device``. Does not wait for a GPU."""
    # On other devices, a copy in the background could read host memory that was freed in the meantime.
    return tensor.to(device, non_blocking=device.type == "cuda")


def upload(array: npt.NDArray[Any], device: th.device) -> th.Tensor:
    """Copy an array to a new tensor on ``device``."""
    return to_device(_staged(array, device), device)


def copy_into(target: th.Tensor, array: npt.NDArray[Any]) -> None:
    """Copy an array into a tensor on any device."""
    target.copy_(_staged(array, target.device), non_blocking=target.device.type == "cuda")


def _staged(array: npt.NDArray[Any], device: th.device) -> th.Tensor:
    tensor = pinned(array.shape, torch_dtype(array.dtype), device)
    tensor.numpy()[...] = array
    return tensor


def empty(shape: tuple[int, ...], dtype: th.dtype, device: th.device) -> th.Tensor:
    """Allocate an uninitialised tensor."""
    return allocator(shape, dtype, device)()


@functools.lru_cache(maxsize=256)
def allocator(shape: tuple[int, ...], dtype: th.dtype, device: th.device) -> Callable[[], th.Tensor]:
    """Return a function that allocates uninitialised tensors."""
    if device.type == "cuda" and not has_several_gpus():
        # Code that torch.compile generates uses this function. It takes a third of the time of torch.empty, but is
        # private, and only allocates on the current GPU.
        with contextlib.suppress(ImportError, AttributeError):
            allocate = importlib.import_module("torch._C._dynamo.guards")._empty_strided_cuda
            return functools.partial(allocate, shape, th.empty(shape, device="meta").stride(), dtype)
    return functools.partial(th.empty, shape, dtype=dtype, device=device)


@functools.cache
def has_several_gpus() -> bool:
    """Whether there are several GPUs, so that the current one may differ from that of a buffer."""
    return th.cuda.device_count() > 1


class ParentOnly:
    """Owns CUDA memory or events, and leaks them in forked children, where freeing them would end the process.

    :param device: The device to wait for before freeing: it may still use the memory, which torch does not know.
    """

    _process: int | None = None
    """The process that created it; ``None`` until the constructor has finished."""

    def __init__(self, kept: Any, device: th.device | None = None) -> None:
        self._kept = kept
        self._device = device
        self._process = os.getpid()

    def __del__(self) -> None:
        if self._process not in (None, os.getpid()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._kept))
        elif self._process and self._device is not None and self._device.type == "cuda" and not sys.is_finalizing():
            th.cuda.synchronize(self._device)


class Staging:
    """A ring of rows in pinned memory, from which data is sent to the device in the background.

    A row is reused once the device has read it. To know that, an event is recorded after each half of the ring.
    """

    def __init__(self, row_size: int, dtype: th.dtype, device: th.device) -> None:
        self.row_size = -(-max(row_size, 1) // _ALIGNMENT) * _ALIGNMENT
        self._half = min(max(_STAGING_BYTES // (self.row_size * dtype.itemsize), 2), _MOST_ROWS) // 2
        memory = pinned((2 * self._half, self.row_size), dtype, device)
        self.tensors = memory.unbind(0)
        self.arrays: list[npt.NDArray[Any]] = list(memory.numpy())
        self._next = 0
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._events = [th.cuda.Event() for _ in range(2)] if self._on_gpu else []  # type: ignore[no-untyped-call]
        self._kept = ParentOnly((memory, self._events), device)
        self.sent = th.empty(self.row_size, dtype=dtype, device=device)
        """The newest row, on the device."""
        self._addresses = [row.data_ptr() for row in self.tensors]
        self._uses_driver = self._on_gpu and has_driver() and not has_several_gpus()
        self._target = self.sent.data_ptr(), dtype.itemsize, self.sent.device.index

    def next(self) -> int:
        """Return the number of a row that may be filled. Enqueue what reads it before the next call."""
        row = self._next
        self._next = (row + 1) % len(self.arrays)
        if self._on_gpu and row % self._half == 0:
            half = row // self._half
            self._events[1 - half].record(th.cuda.current_stream(self._device))
            self._events[half].synchronize()  # the device has nearly always passed it long ago
        return row

    def send(self, row: int, size: int | None = None) -> th.Tensor:
        """Copy a row, or the first ``size`` elements of it, to :attr:`sent`."""
        size = self.row_size if size is None else size
        if self._uses_driver:
            target, item_bytes, index = self._target
            copy_to_device(target, self._addresses[row], size * item_bytes, th._C._cuda_getCurrentRawStream(index))
        else:
            self.sent[:size].copy_(self.tensors[row][:size], non_blocking=self._on_gpu)
        return self.sent


class Observations(NamedTuple):
    """One or two observations of each environment, on the device."""

    parts: list[th.Tensor]
    """``uint8``: for each, the memory of the observations of all environments."""
    form: MemoryForm
    """The order of the frames' bytes in this memory."""
    continues: bool = False
    """Whether the first of two observations equals the newest appended one. Then ``parts`` only has the second."""


class ObservationStaging:
    """Sends the observations of a step to the device in one copy.

    They are sent in memory order: the device transposes faster than the host. In most steps, the first observation
    equals the second one of the previous step. It is then not sent again: comparing takes less time than sending.
    """

    def __init__(self, layout: StackLayout, n_envs: int, device: th.device) -> None:
        self._layout = layout
        self._device = device
        self._part_size = -(-n_envs * layout.stack * layout.frame.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._staging: Staging | None = None
        self._parts: list[th.Tensor] = []
        self._sent: tuple[Bytes, MemoryForm] | None = None
        """The last observation of each environment in the newest row."""
        self._appended: tuple[Bytes, MemoryForm] | None = None
        """Equals ``_sent`` once it was appended, until something else is sent; otherwise ``None``."""

    def note_appended(self) -> None:
        """Note that the observations that were sent last have been appended, for all environments."""
        self._appended = self._sent

    def forget(self) -> None:
        """Note that the newest appended observation is not known any more."""
        self._sent = self._appended = None

    @property
    def tensors(self) -> list[th.Tensor]:
        """The tensors on the device."""
        return [] if self._staging is None else [self._staging.sent]

    def send(self, observations: Sequence[npt.NDArray[Any]]) -> Observations:
        """Send observations of all environments, or of some. The result is valid until the next call."""
        memories = [self._layout.in_memory(part) for part in observations]
        form = memories[0][1]
        if any(other != form for _, other in memories):
            memories = [self._layout.in_memory(np.ascontiguousarray(part)) for part in observations]
            form = memories[0][1]
        size, n = self._part_size, len(memories)
        continues = n > 1 and self._is_newest(*memories[0])
        self.forget()
        if continues:
            memories, n = memories[1:], 1
        if self._staging is None or len(self._parts) < n:
            self._staging = Staging(n * size, th.uint8, self._device)
            self._parts = [self._staging.sent[i * size : (i + 1) * size] for i in range(n)]
        row = self._staging.next()
        for i, (memory, _) in enumerate(memories):
            part = self._staging.arrays[row][i * size : i * size + memory.size]
            part[:] = memory.reshape(-1)
        self._staging.send(row, n * size)
        self._sent = part, form
        return Observations(self._parts[:n], form, continues)

    def _is_newest(self, memory: Bytes, form: MemoryForm) -> bool:
        if self._appended is None or self._appended[1] != form or self._appended[0].size != memory.size:
            return False
        words = np.uint64 if memory.size % 8 == 0 else np.uint8
        return bool((memory.reshape(-1).view(words) == self._appended[0].view(words)).all())

    def take(self, observations: Sequence[th.Tensor], stream: th.cuda.Stream | None) -> Observations:
        """Use observations that are on the device already, and are going to be read on ``stream``."""
        self.forget()
        if stream is not None:
            for part in observations:  # their memory must not be reused before that
                part.record_stream(stream)
        parts = [part.contiguous() for part in observations]
        if parts[0].dtype != th.uint8:
            parts = [part.view(-1).view(th.uint8) for part in parts]
        # Kernels are compiled for tensors that are aligned to 16 bytes, as new ones are.
        parts = [part if part.data_ptr() % 16 == 0 else part.clone() for part in parts]
        return Observations(parts, self._layout.contiguous_form)


class Places:
    """Slots and environments of a batch, on the host and on the device.

    :param slots: The slots to read in each column, or once for both columns.
    :param staging: Pinned memory to send them from. Their tensor is valid until it is used again. By default, they get
        a tensor of their own.
    """

    def __init__(
        self, slots: Sequence[Indices], envs: Indices, device: th.device, staging: Staging | None = None
    ) -> None:
        self.slots = slots
        self.envs = envs
        self.n = n = len(envs)
        self.second_at = n * (len(slots) - 1)
        """The index in :attr:`numbers` at which the slots of the second column begin."""
        self.envs_at = n * len(slots)
        """The index in :attr:`numbers` at which the environments begin."""
        self.numbers: th.Tensor
        """``int64``: the slots of the columns, followed by the environments. Anything after them is unused."""
        if staging is None:
            self.numbers = upload(np.concatenate([*slots, envs]).astype(np.int64, copy=False), device)
            return
        row = staging.next()
        array = staging.arrays[row]
        for i, part in enumerate((*slots, envs)):
            array[i * n : (i + 1) * n] = part
        self.numbers = staging.send(row)

    def rows(self, column: int) -> tuple[th.Tensor, th.Tensor]:
        """The slots of a column and the environments, as indices for tensors."""
        first = self.second_at if column else 0
        return self.numbers[first : first + self.n], self.numbers[self.envs_at : self.envs_at + self.n]

    def host_slots(self, column: int) -> Indices:
        return self.slots[-1] if column else self.slots[0]


class Report:
    """A tensor whose contents are copied to the host in the background."""

    def __init__(self, tensor: th.Tensor) -> None:
        self._tensor = tensor
        self._copy = pinned(tuple(tensor.shape), tensor.dtype, tensor.device)
        self._array: npt.NDArray[Any] = self._copy.numpy()
        self._on_gpu = tensor.device.type == "cuda"
        self._arrived = th.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._kept = ParentOnly((self._copy, self._arrived))

    def request(self) -> None:
        """Start the copy."""
        self._copy.copy_(self._tensor, non_blocking=self._on_gpu)
        if self._arrived is not None:
            self._arrived.record(th.cuda.current_stream(self._tensor.device))

    @property
    def has_arrived(self) -> bool:
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def wait(self) -> npt.NDArray[Any]:
        """Wait for the copy, and return the tensor's contents at the request. The next request overwrites them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._array


class Progress:
    """How many observations the device has appended. It writes this to host memory, where reading it is free."""

    def __init__(self, n_lanes: int, device: th.device) -> None:
        self.words = pinned((n_lanes,), th.int64, device).zero_()
        """For each lane, its head in the lower 32 bits, and above them the number of observations appended so far."""
        self._array: npt.NDArray[np.int64] = self.words.numpy()
        self._kept = ParentOnly(self.words, device)

    def look(self, appended: int) -> tuple[int, Indices]:
        """Return how many of ``appended`` observations all lanes have by now, and the heads.

        Some heads may be ahead, because lanes do not finish at the same time.
        """
        words = self._array.copy()
        behind = int(((appended - (words >> 32)) & COUNT_MASK).max())
        return appended - behind, words & 0xFFFFFFFF
