"""libzstd called from compiled code. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only."""

from __future__ import annotations

import numpy as np
from numba import njit, types

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.codecs.libzstd import MISSING
from sb3_extra_buffers.codecs.memory_kernels import INT, INTS, STORED, address, call, copy, load_int


@njit(nogil=True, cache=True)
def decompress_record(
    decompress: int,
    context: int,
    record: int,
    length: int,
    dictionaries: int,
    n_dictionaries: int,
    reference: int,
    out: int,
    size: int,
) -> int:
    """Decompress a record to ``out`` by ``ZSTD_decompress_usingDDict``, and return the number of bytes.

    It is below zero if the bytes or the reference of the record are invalid.

    :param record: The address of the record. ``dictionaries`` and ``out`` are addresses, too.
    :param size: The most bytes that fit into ``out``.
    """
    if not 0 <= reference < n_dictionaries:
        return -1
    dictionary = load_int(dictionaries + 8 * reference)
    if dictionary == MISSING:
        return -1
    return np.int64(call(decompress, (context, out, size, record, length, dictionary)))


@njit(nogil=True, cache=True)
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
    size = out.shape[1]
    for row in range(len(starts)):
        start, length, reference = starts[row], lengths[row], references[row]
        if start < 0 or length < 0 or start > data.shape[0] - length:
            return row
        record, target = address(data) + start, address(out) + row * size
        if length == size:
            copy(target, record, size)
            continue
        dictionaries_at, n_dictionaries = address(dictionaries), len(dictionaries)
        if size != decompress_record(
            decompress, context, record, length, dictionaries_at, n_dictionaries, reference, target, size
        ):
            return row
    return len(starts)


def compile_all() -> None:
    # Not where it is defined: the kernels that gather batches import this module, but do not need this function.
    if not decode.signatures:
        decode.compile(INT(STORED, INTS, INTS, INTS, types.uint8[:, ::1], INT, INT, INTS))
        decode.disable_compile()
