"""``zstd`` records decompressed by the GPU, with nvCOMP.

Its C interface is used, because the one for Python wants an object for each record, and making these takes longer than
decompressing.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from typing import Any

import torch as th

from sb3_extra_buffers.errors import CorruptDataError

_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p


class _Options(ctypes.Structure):
    """``nvcompBatchedZstdDecompressOpts_t``; zeros are the defaults."""

    _fields_ = (("backend", ctypes.c_int), ("reserved", ctypes.c_char * 60))


_SIGNATURES: dict[str, list[Any]] = {
    "nvcompBatchedZstdDecompressGetTempSize": [_SIZE, _SIZE, _Options, ctypes.POINTER(_SIZE), _SIZE, _POINTER],
    "nvcompBatchedZstdDecompressAsync": [
        _POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER, _Options, _POINTER, _POINTER,
    ],
}  # fmt: skip


@functools.cache
def _library() -> Any:
    """nvCOMP 6 for torch's version of CUDA, or ``None``."""
    try:
        package = importlib.import_module("nvidia.libnvcomp")
    except ImportError:
        return None
    if th.version.cuda is None or package.__cuda_version__ != th.version.cuda.partition(".")[0]:
        return None
    library = package.load_library()
    if library is None or not all(hasattr(library, name) for name in _SIGNATURES):
        return None
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    return library


def is_available(device: th.device) -> bool:
    return device.type == "cuda" and _library() is not None


def decompress(sources: th.Tensor, lengths: th.Tensor, targets: th.Tensor, record_bytes: int) -> None:
    """Decompress records of ``record_bytes`` each, without waiting for the device.

    :param sources: The addresses of the records, ``int64``.
    :param lengths: Their lengths, ``int64``.
    :param targets: The addresses that they are decompressed to, ``int64``.
    """
    n, device = len(sources), sources.device
    with th.cuda.device(device):
        n_scratch = _scratch_bytes(n, record_bytes)
        scratch = th.empty(n_scratch, dtype=th.uint8, device=device)
        room, sizes = th.full((2, n), record_bytes, dtype=th.int64, device=device).unbind(0)
        statuses = th.empty(n, dtype=th.int32, device=device)
        arguments = (
            *(tensor.data_ptr() for tensor in (sources, lengths, room, sizes)), n, scratch.data_ptr(), n_scratch,
            targets.data_ptr(), _Options(), statuses.data_ptr(), th.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        _check(_library().nvcompBatchedZstdDecompressAsync(*arguments))


def decompress_to_rows(sources: th.Tensor, lengths: th.Tensor, out: th.Tensor) -> None:
    """The same into the rows of ``out``, which have the size of a record."""
    n, record_bytes = out.shape
    begin = out.data_ptr()
    targets = th.arange(begin, begin + n * record_bytes, record_bytes, device=out.device)
    decompress(sources, lengths, targets, record_bytes)


@functools.lru_cache
def _scratch_bytes(n: int, record_bytes: int) -> int:
    needed = _SIZE()
    get_size = _library().nvcompBatchedZstdDecompressGetTempSize
    _check(get_size(n, record_bytes, _Options(), ctypes.byref(needed), n * record_bytes, None))
    return needed.value


def _check(status: int) -> None:
    if status:
        raise CorruptDataError(f"nvCOMP does not decompress a batch of records: status {status}.")
