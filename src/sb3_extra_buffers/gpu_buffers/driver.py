"""CUDA's driver, called directly: for memory that grows in place, and for copies and launches in every step.

Torch and Triton inspect the arguments of every call, which takes longer than the driver's part of it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch as th

_PIECE = 2 << 20
"""CUDA maps memory in pieces of this size."""
_LARGE = 2 * _PIECE
"""Memory of this size grows in place."""
_NO_CONTEXT = 201
"""The error of a thread that has not used CUDA yet."""
_size = ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemcpyHtoDAsync_v2": (_size, ctypes.c_void_p, _size, ctypes.c_void_p),
    "cuLaunchKernel": (ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3),
}


@functools.cache
def _driver() -> Any:
    """CUDA's driver, if it can be called."""
    try:
        # Calls take too little time to be worth releasing Python's lock.
        library = ctypes.PyDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None
    for name, types in _SIGNATURES.items():
        getattr(library, name).argtypes = types
    return library


def _call(name: str, *arguments: Any, may_fail: bool = False) -> bool:
    """Call a function of CUDA's driver. Returns whether that has succeeded."""
    code = getattr(_driver(), name)(*arguments)
    if code and not may_fail:
        raise th.cuda.OutOfMemoryError(f"CUDA has no memory left for a buffer: {name} failed with error {code}.")
    return not code


def _enqueue(function: Any, *arguments: Any) -> None:
    """Call a function that puts work on a stream of the current GPU."""
    code = function(*arguments)
    if code == _NO_CONTEXT:
        th.cuda.current_stream().query()  # anything that torch does lets this thread use CUDA
        code = function(*arguments)
    if code:
        raise RuntimeError(f"CUDA's driver failed with error {code}.")


def copy_to_device(target: int, source: int, size: int, stream: int) -> None:
    """Copy bytes from pinned memory to the current GPU. Addresses are numbers."""
    _enqueue(_driver().cuMemcpyHtoDAsync_v2, target, source, size, stream)


class Kernel:
    """A kernel that Triton has compiled. Its arguments are tensors first, and then numbers of 32 bits.

    :param compiled: What Triton returns from a launch.
    """

    def __init__(self, compiled: Any, n_tensors: int, n_numbers: int) -> None:
        self._function = compiled.function
        self._shape = 32 * compiled.metadata.num_warps, 1, 1, compiled.metadata.shared
        # Triton's kernels have two more arguments, for memory that ours do not need.
        self._formats = "Q" * n_tensors + "i" * n_numbers + "QQ"
        self._fill = struct.Struct(self._formats).pack_into
        self._launch = _driver().cuLaunchKernel
        self._threads = threading.local()  # not a lock, since Ctrl-C could leave it locked

    @staticmethod
    def can_launch(compiled: Any) -> bool:
        """Whether a kernel needs nothing but its arguments."""
        metadata = compiled.metadata
        needs = metadata.global_scratch_size, metadata.profile_scratch_size, metadata.launch_cooperative_grid
        return _driver() is not None and not any(needs) and metadata.num_ctas == 1 and not metadata.launch_pdl

    def launch(self, grid: tuple[int, int], stream: int, tensors: Sequence[th.Tensor], numbers: Sequence[int]) -> None:
        arguments = getattr(self._threads, "arguments", None)
        if arguments is None:
            arguments = self._threads.arguments = self._make_arguments()
        memory, pointers = arguments
        self._fill(memory, 0, *[tensor.data_ptr() for tensor in tensors], *numbers, 0, 0)
        _enqueue(self._launch, self._function, *grid, 1, *self._shape, stream, pointers, None)

    def repeated(
        self, grid: tuple[int, int], tensors: Sequence[th.Tensor], numbers: Sequence[int], n_outputs: int
    ) -> Callable[[int, Sequence[th.Tensor]], None]:
        """A function that launches the kernel on a stream, each time with other outputs, which are its last tensors.

        Only one thread at a time may call it, and somebody else must keep the other tensors alive.
        """
        memory, pointers = self._make_arguments()
        self._fill(memory, 0, *[tensor.data_ptr() for tensor in tensors], *numbers, 0, 0)
        fill_outputs, offset = struct.Struct("Q" * n_outputs).pack_into, 8 * (len(tensors) - n_outputs)
        launch, fixed = self._launch, (self._function, *grid, 1, *self._shape)

        def run(stream: int, outputs: Sequence[th.Tensor]) -> None:
            fill_outputs(memory, offset, *[output.data_ptr() for output in outputs])
            _enqueue(launch, *fixed, stream, pointers, None)

        return run

    def _make_arguments(self) -> Any:
        """Memory for the arguments of a launch, and where in it each of them is."""
        memory = ctypes.create_string_buffer(struct.calcsize(self._formats))
        ends = [struct.calcsize(self._formats[: i + 1]) for i in range(len(self._formats))]
        begin = ctypes.addressof(memory)
        places = [begin + end - struct.calcsize(kind) for end, kind in zip(ends, self._formats, strict=True)]
        return memory, (ctypes.c_void_p * len(places))(*places)


class DeviceMemory:
    """Bytes on a device that grow in place, where CUDA allows it.

    Torch would copy them to a larger piece of memory each time, and keep the old ones, which add up to many times what
    is in use.
    """

    def __init__(self, device: th.device) -> None:
        self.bytes = th.empty(0, dtype=th.uint8, device=device)
        """All of it as a tensor."""
        self._addresses: _Addresses | None = None

    def __len__(self) -> int:
        return self.bytes.shape[0]

    def grow(self, size: int) -> None:
        """Make it larger. Bytes keep their places; those that are added are uninitialised."""
        smaller, device = self.bytes, self.bytes.device
        if self._addresses is not None:
            self.bytes = self._addresses.tensor(size)
            return
        if device.type == "cuda" and size >= _LARGE and _driver() is not None:
            self._addresses = _Addresses(device)
            self.bytes = self._addresses.tensor(size)
        else:
            self.bytes = smaller.new_empty(size)
        self.bytes[: len(smaller)] = smaller


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Addresses:
    """A range of addresses of a GPU, to whose beginning memory has been added."""

    _process: int | None = None
    """``None`` until the constructor is through."""

    def __init__(self, device: th.device) -> None:
        self._device = device
        self._size = 0
        location = _Location(1, device.index)  # a device
        self._properties = _Properties(kind=1, location=location)  # pinned, which is all there is
        self._access = _Access(location, 3)  # to read and to write
        # More than will ever fit in. Addresses take no memory.
        self._range = -(-th.cuda.get_device_properties(device).total_memory // _PIECE) * _PIECE
        address = ctypes.c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(address), _size(self._range), _size(0), _size(0), _size(0))
        self._begin = address.value
        self._process = os.getpid()

    def tensor(self, size: int) -> th.Tensor:
        """The first ``size`` bytes, for which memory is added if necessary."""
        missing = -(-(size - self._size) // _PIECE) * _PIECE
        if missing > 0:
            handle, target = ctypes.c_uint64(), _size(self._begin + self._size)
            create = "cuMemCreate", ctypes.byref(handle), _size(missing), ctypes.byref(self._properties), _size(0)
            if not _call(*create, may_fail=True):
                th.cuda.empty_cache()  # what torch has kept for later
                _call(*create)
            _call("cuMemMap", target, _size(missing), _size(0), handle, _size(0))
            _call("cuMemRelease", handle)  # it stays as long as it is mapped
            _call("cuMemSetAccess", target, _size(missing), ctypes.byref(self._access), _size(1))
            self._size += missing
        interface = {"shape": (size,), "typestr": "|u1", "data": (self._begin, False), "version": 3}
        # The tensor refers to this object, and so to the memory.
        holder = type("Array", (), {"__cuda_array_interface__": interface, "memory": self})()
        tensor: th.Tensor = th.as_tensor(holder, device=self._device)
        return tensor

    def __del__(self) -> None:
        # A forked child has no device. At the end of a process, CUDA may be gone already.
        if self._process == os.getpid() and not sys.is_finalizing():
            th.cuda.synchronize(self._device)  # until then kernels may use it
            if self._size:
                _call("cuMemUnmap", _size(self._begin), _size(self._size))
            _call("cuMemAddressFree", _size(self._begin), _size(self._range))
