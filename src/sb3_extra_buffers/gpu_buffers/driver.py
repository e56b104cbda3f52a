"""Direct calls of CUDA's driver: for memory that grows in place, and for the copies and launches of every step.

Torch and Triton inspect the arguments of every call, which takes longer than the driver's own work.
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
"""The granularity of memory mappings, in bytes."""
_LARGE = 2 * _PIECE
"""From this size on, in bytes, memory grows in place. Smaller memory is copied when it grows."""
_NO_CONTEXT = 201
"""``CUDA_ERROR_INVALID_CONTEXT``: the calling thread has not used CUDA yet."""
_uint64 = ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemcpyHtoDAsync_v2": (_uint64, ctypes.c_void_p, _uint64, ctypes.c_void_p),
    "cuLaunchKernel": (ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3),
}


@functools.cache
def _driver() -> Any:
    """CUDA's driver; ``None`` if it cannot be loaded."""
    try:
        # Calls are too short to be worth releasing the GIL.
        library = ctypes.PyDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None
    for name, types in _SIGNATURES.items():
        getattr(library, name).argtypes = types
    return library


def has_driver() -> bool:
    """Whether the functions of this module can be called. Without CUDA's driver, as on ROCm, torch does the work."""
    return _driver() is not None


def _call(name: str, *arguments: Any, may_fail: bool = False) -> bool:
    """Call a function of CUDA's driver, and return whether it succeeded."""
    code = getattr(_driver(), name)(*arguments)
    if code and not may_fail:
        raise th.cuda.OutOfMemoryError(f"CUDA has no memory left for a buffer: {name} failed with error {code}.")
    return not code


def _enqueue(function: Any, *arguments: Any) -> None:
    """Call a function of the driver that enqueues work on a stream of the current GPU."""
    code = function(*arguments)
    if code == _NO_CONTEXT:
        th.cuda.current_stream().query()  # any CUDA call of torch gives this thread a context
        code = function(*arguments)
    if code:
        raise RuntimeError(f"CUDA's driver failed with error {code}.")


def copy_to_device(target: int, source: int, size: int, stream: int) -> None:
    """Copy ``size`` bytes from pinned memory to the current GPU. ``target`` and ``source`` are addresses."""
    _enqueue(_driver().cuMemcpyHtoDAsync_v2, target, source, size, stream)


class Kernel:
    """A kernel that Triton has compiled. Its arguments are tensors, followed by 32-bit integers.

    :param compiled: What Triton returns from a launch.
    """

    def __init__(self, compiled: Any, n_tensors: int, n_numbers: int) -> None:
        self._function = compiled.function
        self._shape = 32 * compiled.metadata.num_warps, 1, 1, compiled.metadata.shared
        # Triton adds two arguments, for scratch memory that these kernels do not need.
        self._formats = "Q" * n_tensors + "i" * n_numbers + "QQ"
        self._fill = struct.Struct(self._formats).pack_into
        self._launch = _driver().cuLaunchKernel
        self._threads = threading.local()  # not a lock: Ctrl-C could leave it locked

    @staticmethod
    def can_launch(compiled: Any) -> bool:
        """Whether a kernel needs nothing except its arguments, such as scratch memory or clusters."""
        if not has_driver():
            return False
        metadata = compiled.metadata
        needs = metadata.global_scratch_size, metadata.profile_scratch_size, metadata.launch_cooperative_grid
        return not any(needs) and metadata.num_ctas == 1 and not metadata.launch_pdl

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
        """Return a function that launches the kernel on a stream with new outputs, which are its last tensors.

        Only one thread at a time may call it. The caller must keep the other tensors alive.
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
        """Memory for the arguments of a launch, and pointers to each of them."""
        memory = ctypes.create_string_buffer(struct.calcsize(self._formats))
        ends = [struct.calcsize(self._formats[: i + 1]) for i in range(len(self._formats))]
        begin = ctypes.addressof(memory)
        places = [begin + end - struct.calcsize(kind) for end, kind in zip(ends, self._formats, strict=True)]
        return memory, (ctypes.c_void_p * len(places))(*places)


class DeviceMemory:
    """Bytes on a device that grow in place, if CUDA's driver can be called.

    Torch would copy them to a larger block whenever they grow. Its allocator would keep the old blocks, which add up to
    many times the memory in use.
    """

    def __init__(self, device: th.device) -> None:
        self.bytes = th.empty(0, dtype=th.uint8, device=device)
        """The whole memory as a tensor."""
        self._addresses: _AddressRange | None = None

    def __len__(self) -> int:
        return self.bytes.shape[0]

    def grow(self, size: int) -> None:
        """Grow to ``size`` bytes. Old bytes keep their places, new ones are uninitialised."""
        smaller, device = self.bytes, self.bytes.device
        if self._addresses is not None:
            self.bytes = self._addresses.tensor(size)
            return
        if device.type == "cuda" and size >= _LARGE and has_driver():
            self._addresses = _AddressRange(device)
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


class _AddressRange:
    """A reserved range of GPU addresses. Memory is mapped at its beginning, and more is added as needed."""

    _process: int | None = None
    """The process that created it; ``None`` until the constructor has finished."""

    def __init__(self, device: th.device) -> None:
        self._device = device
        self._size = 0
        location = _Location(1, device.index)  # CU_MEM_LOCATION_TYPE_DEVICE
        self._properties = _Properties(kind=1, location=location)  # CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = _Access(location, 3)  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        # All of the GPU's memory, so that the range never has to move. Addresses take no memory.
        self._range = -(-th.cuda.get_device_properties(device).total_memory // _PIECE) * _PIECE
        address = ctypes.c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(address), _uint64(self._range), _uint64(0), _uint64(0), _uint64(0))
        self._begin = address.value
        self._process = os.getpid()

    def tensor(self, size: int) -> th.Tensor:
        """The first ``size`` bytes as a tensor. Memory is added if necessary."""
        missing = -(-(size - self._size) // _PIECE) * _PIECE
        if missing > 0:
            handle, target = ctypes.c_uint64(), _uint64(self._begin + self._size)
            create = "cuMemCreate", ctypes.byref(handle), _uint64(missing), ctypes.byref(self._properties), _uint64(0)
            if not _call(*create, may_fail=True):
                th.cuda.empty_cache()  # free the memory that torch's allocator has cached
                _call(*create)
            _call("cuMemMap", target, _uint64(missing), _uint64(0), handle, _uint64(0))
            _call("cuMemRelease", handle)  # the memory lives as long as it is mapped
            _call("cuMemSetAccess", target, _uint64(missing), ctypes.byref(self._access), _uint64(1))
            self._size += missing
        interface = {"shape": (size,), "typestr": "|u1", "data": (self._begin, False), "version": 3}
        # The tensor keeps this object alive, and with it the memory.
        holder = type("Array", (), {"__cuda_array_interface__": interface, "memory": self})()
        tensor: th.Tensor = th.as_tensor(holder, device=self._device)
        return tensor

    def __del__(self) -> None:
        # A forked child cannot use CUDA. At interpreter exit, CUDA may have shut down already.
        if self._process == os.getpid() and not sys.is_finalizing():
            th.cuda.synchronize(self._device)  # kernels may still be using the memory
            if self._size:
                _call("cuMemUnmap", _uint64(self._begin), _uint64(self._size))
            _call("cuMemAddressFree", _uint64(self._begin), _uint64(self._range))
