"""libzstd called from compiled code. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.codecs.libzstd import MISSING

_INT, _INTS = types.int64, types.int64[::1]
_STORED = types.Array(types.uint8, 1, "C", readonly=True)


def _call(typing_context: Any, address: Any, arguments: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        n, integer = signature.args[1].count, ir.IntType(64)
        passed = [builder.extract_value(values[1], i) for i in range(n)]
        function = builder.inttoptr(values[0], ir.FunctionType(integer, [integer] * n).as_pointer())
        return builder.call(function, passed)

    integers = types.UniTuple(types.intp, len(arguments))  # type: ignore[no-untyped-call]
    return types.intp(types.intp, integers), generate


call: Any = intrinsic(_call)
"""``call(address, arguments)``: what a C function returns, an integer, for a tuple of integers or pointers.

The address is a plain integer, so that numba can cache the kernel on disk. It cannot cache kernels that refer to
``ctypes`` objects.
"""


@njit(nogil=True, cache=True)
def decompress_record(
    decompress: int,
    context: int,
    data: Bytes,
    start: int,
    length: int,
    dictionaries: Indices,
    reference: int,
    out: Bytes,
) -> bool:
    """Decode one record by ``ZSTD_decompress_usingDDict``; false if its bytes or its reference are invalid."""
    if not 0 <= reference < len(dictionaries) or dictionaries[reference] == MISSING:
        return False
    size = out.shape[0]
    written = call(
        decompress,
        (context, np.intp(out.ctypes.data), size, np.intp(data.ctypes.data) + start, length, dictionaries[reference]),
    )
    return bool(written == size)


@njit(_INT(_STORED, _INTS, _INTS, _INTS, types.uint8[:, ::1], _INT, _INT, _INTS), nogil=True, cache=True)
def decode(
    data: Bytes,
    starts: Indices,
    lengths: Indices,
    references: Indices,
    out: Bytes,
    decompress: int,
    context: int,
    dictionaries: Indices,
) -> int:
    """Decode records into the rows of ``out``. Returns the number of the first invalid one, or ``len(starts)``."""
    for row in range(len(starts)):
        start, length, reference = starts[row], lengths[row], references[row]
        if start < 0 or length < 0 or start + length > data.shape[0]:
            return row
        if length == out.shape[1]:
            for byte in range(length):  # numba compiles a slice assignment to far more code
                out[row, byte] = data[start + byte]
        elif not decompress_record(decompress, context, data, start, length, dictionaries, reference, out[row]):
            return row
    return len(starts)


def compile_all() -> None:
    """Nothing to do: functions with declared types are compiled when they are defined."""
