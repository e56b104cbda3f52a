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


def decompress(sources: th.Tensor, lengths: th.Tensor, out: th.Tensor) -> None:
    """Decompress records into the rows of ``out``, which have the size of a record, without waiting for the device.

    :param sources: The addresses of the records, ``int64``.
    :param lengths: Their lengths, ``int64``.
    """
    library, (n, record_bytes) = _library(), out.shape
    with th.cuda.device(out.device):
        stream = th.cuda.current_stream().cuda_stream
        needed = _SIZE()
        _check(
            library.nvcompBatchedZstdDecompressGetTempSize(
                n, record_bytes, _Options(), ctypes.byref(needed), n * record_bytes, stream
            )
        )
        scratch = th.empty(needed.value, dtype=th.uint8, device=out.device)
        room, sizes = th.full((2, n), record_bytes, dtype=th.int64, device=out.device).unbind(0)
        statuses = th.empty(n, dtype=th.int32, device=out.device)
        targets = th.arange(out.data_ptr(), out.data_ptr() + out.numel(), record_bytes, device=out.device)
        arguments = (
            *(tensor.data_ptr() for tensor in (sources, lengths, room, sizes)), n, scratch.data_ptr(), needed.value,
            targets.data_ptr(), _Options(), statuses.data_ptr(), stream,
        )  # fmt: skip
        _check(library.nvcompBatchedZstdDecompressAsync(*arguments))


def _check(status: int) -> None:
    if status:
        raise CorruptDataError(f"nvCOMP does not decompress a batch of records: status {status}.")
