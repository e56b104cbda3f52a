"""Compiled form of :mod:`.rle`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only.

A record may start at any byte of the arena, but integers must be aligned. So runs and elements are copied through small
aligned arrays.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.codecs.rle import Unsigned


@njit(nogil=True, cache=True)
def _copy(source: Bytes, target: Bytes) -> None:
    """Copy between parts of equal length; numba's own ``target[:] = source`` takes four times as long."""
    for index in range(len(target)):
        target[index] = source[index]


@njit(nogil=True, cache=True)
def encode(elements: Unsigned, no_runs: Unsigned, longest_run: int, data: Bytes, lengths: Indices) -> int:
    """Encode the rows of ``elements`` into ``data``, one after the other. Returns how many bytes they take."""
    n_records, size = elements.shape
    record_bytes = size * elements.itemsize
    pair_bytes = no_runs.itemsize + elements.itemsize
    most_runs = (record_bytes - 1) // pair_bytes  # with more of them, the raw record is no larger
    runs = np.empty(most_runs + 1, dtype=no_runs.dtype)
    values = np.empty(most_runs + 1, dtype=elements.dtype)
    run_bytes, value_bytes = runs.view(np.uint8), values.view(np.uint8)
    end = 0
    for record in range(n_records):
        row = elements[record]
        count = 0
        position = 0
        while position < size and count <= most_runs:
            value = row[position]
            start = position
            limit = min(size, start + longest_run)
            position += 1
            while position < limit and row[position] == value:
                position += 1
            runs[count] = position - start
            values[count] = value
            count += 1
        length = count * pair_bytes
        if count <= most_runs:
            middle = end + count * no_runs.itemsize
            _copy(run_bytes[: middle - end], data[end:middle])
            _copy(value_bytes[: count * elements.itemsize], data[middle : end + length])
        else:
            length = record_bytes
            _copy(row.view(np.uint8), data[end : end + length])
        lengths[record] = length
        end += length
    return end


@njit(nogil=True, cache=True)
def decode(data: Bytes, starts: Indices, lengths: Indices, no_runs: Unsigned, elements: Unsigned) -> int:
    """Decode records into the rows of ``elements``. Returns the number of the first invalid one, or ``len(starts)``."""
    n_records, size = elements.shape
    record_bytes = size * elements.itemsize
    pair_bytes = no_runs.itemsize + elements.itemsize
    most_runs = record_bytes // pair_bytes
    runs = np.empty(most_runs + 1, dtype=no_runs.dtype)
    values = np.empty(most_runs + 1, dtype=elements.dtype)
    run_bytes, value_bytes = runs.view(np.uint8), values.view(np.uint8)
    for record in range(n_records):
        start, length = starts[record], lengths[record]
        if start < 0 or length < 0 or length > record_bytes or start > data.shape[0] - length:
            return record
        row = elements[record]
        if length == record_bytes:
            _copy(data[start : start + length], row.view(np.uint8))
            continue
        count = length // pair_bytes
        if count * pair_bytes != length:
            return record
        middle = start + count * no_runs.itemsize
        _copy(data[start:middle], run_bytes[: middle - start])
        _copy(data[middle : start + length], value_bytes[: count * elements.itemsize])
        position = np.int64(0)
        for index in range(count):
            run = np.int64(runs[index])  # a uint64 beyond the range of int64 turns negative
            if run < 0 or run > size - position:
                return record
            value = values[index]
            for target in range(position, position + run):
                row[target] = value
            position += run
        if position != size:
            return record
    return len(starts)


def compile_all() -> None:
    """Compile for elements of 1 byte and run lengths of 2, the usual case. For others, creating a codec compiles."""
    elements = np.zeros((1, 8), dtype=np.uint8)
    no_runs = np.zeros(0, dtype=np.uint16)
    data, lengths = np.empty(8, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    encode(elements, no_runs, 8, data, lengths)
    decode(data, np.zeros(1, dtype=np.int64), lengths, no_runs, elements)
