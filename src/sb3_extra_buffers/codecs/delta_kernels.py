"""Compiled decoder of :mod:`.delta`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only.

Frames are addressed by bare numbers here, because they are written in vectors. All memory that holds a frame has
:data:`.VECTOR_BYTES` more bytes behind it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from sb3_extra_buffers.codecs.base import Bytes, Indices, Words
from sb3_extra_buffers.codecs.chains import REFERENCE, WHOLE, ZERO
from sb3_extra_buffers.codecs.delta import LONG_MATCH, LONGEST_SKIP, MATCH_BYTES, header_bytes
from sb3_extra_buffers.codecs.memory_kernels import (
    VECTOR_BYTES,
    address,
    copy,
    copy_padded,
    load8,
    load16,
    repeat,
    store8,
)

_INT, _INTS, _WORDS, _FRAMES = types.int64, types.int64[::1], types.uint32[:, ::1], types.uint8[:, :, ::1]
_STORED = types.Array(types.uint8, 1, "C", readonly=True)

_header_bytes: Any = njit(header_bytes)


@njit(nogil=True, cache=True)
def first_step(data: Bytes, start: int, length: int, group: int, size: int) -> int:
    """Where the steps of a record's first frame begin, or -1 if its length does not agree with its headers."""
    header = _header_bytes(size)
    if length < group * header:
        return -1
    total = group * header
    for i in range(group):
        total += frame_header(data, start, i, size) >> 2
    return start + group * header if total == length else -1


@njit(nogil=True, cache=True)
def frame_header(data: Bytes, start: int, number: int, size: int) -> int:
    """The kind of frame ``number`` of the record at ``start``, and from the third bit on, the length of its steps."""
    header = _header_bytes(size)
    value = np.int64(0)
    for byte in range(header):
        value |= np.int64(data[start + number * header + byte]) << (8 * byte)
    return value


@njit(nogil=True, cache=True)
def follow(frame: int, reference: int, size: int, header: int, at: int, data_end: int, distances: Indices) -> bool:
    """Turn the frame at an address into the next one of its chain; false if the steps at ``at`` are corrupt.

    :func:`first_step` has checked that all bytes of the steps exist.

    :param data_end: The address after the last byte of all records.
    """
    kind, end = header & 3, at + (header >> 2)
    if kind == WHOLE:
        if end - at != size:
            return False
        for byte in range(size):
            store8(frame + byte, load8(at + byte))
        return True
    if kind == REFERENCE:
        copy_padded(frame, reference, size)
    elif kind == ZERO:
        for byte in range(size):
            store8(frame + byte, 0)
    position = np.int64(0)
    while at < end:
        end -= 2
        step = load16(end)
        if step & 1 == 0:
            position += (step >> 1) & LONGEST_SKIP
            n_literals = step >> 10
        else:
            source, length, n_literals = (step >> 1) & 31, (step >> 6) & 31, step >> 11
            if length == LONG_MATCH:
                length += load8(at)
                at += 1
            length += MATCH_BYTES
            distance = distances[source]
            if position + length > size or distance > position:
                return False
            target = frame + position
            if source == 0:
                copy(target, reference + position, length)
            elif distance >= 32:
                copy(target, target - distance, length)
            else:
                repeat(target, distance, length)
            position += length
        if position + n_literals > size or at + n_literals > end:
            return False
        if at + VECTOR_BYTES <= data_end:
            copy(frame + position, at, n_literals)
        else:  # a vector might reach beyond the end of the arena
            for byte in range(n_literals):
                store8(frame + position + byte, load8(at + byte))
        position += n_literals
        at += n_literals
    return at == end


@njit(_INT(_STORED, _INTS, _INTS, _INTS, _FRAMES, _WORDS, _INTS), nogil=True, cache=True)
def decode(
    data: Bytes,
    starts: Indices,
    lengths: Indices,
    references: Indices,
    out: Bytes,
    table: Words,
    distances: Indices,
) -> int:
    """Decode records into ``out[i]``. Returns the number of the first invalid one, or ``len(starts)``."""
    group, size = out.shape[1], out.shape[2]
    frame = np.empty(4 * table.shape[1], dtype=np.uint8)
    frame_at, data_at = address(frame), address(data)
    for row in range(len(starts)):
        start, length, reference = starts[row], lengths[row], references[row]
        if start < 0 or length < 0 or start + length > data.shape[0]:
            return row
        if length == group * size:
            for i in range(group):
                for byte in range(size):
                    out[row, i, byte] = data[start + i * size + byte]
            continue
        at = first_step(data, start, length, group, size)
        if at < 0 or not 0 <= reference < table.shape[0]:
            return row
        reference_at = address(table) + reference * 4 * table.shape[1]
        copy_padded(frame_at, reference_at, size)
        for i in range(group):
            header = frame_header(data, start, i, size)
            if not follow(frame_at, reference_at, size, header, data_at + at, data_at + data.shape[0], distances):
                return row
            at += header >> 2
            for byte in range(size):
                out[row, i, byte] = frame[byte]
    return len(starts)


def compile_all() -> None:
    """Nothing to do: functions with declared types are compiled when they are defined."""
