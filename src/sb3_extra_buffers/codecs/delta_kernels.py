"""Compiled decoder of :mod:`.delta`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only.

Frames are given as addresses, because they are written in whole vectors. So wherever a frame is decoded, there are at
least :data:`.VECTOR_BYTES` more bytes after it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from sb3_extra_buffers.codecs.base import Bytes, Indices, Words
from sb3_extra_buffers.codecs.chains import PREVIOUS, REFERENCE, WHOLE, ZERO
from sb3_extra_buffers.codecs.delta import LONG_MATCH, LONGEST_SKIP, MATCH_BYTES, header_bytes
from sb3_extra_buffers.codecs.memory_kernels import (
    FRAMES,
    INT,
    INTS,
    STORED,
    VECTOR_BYTES,
    WORDS_2D,
    address,
    copy,
    copy_some,
    load8,
    load16,
    load32,
    load_int,
    repeat,
    store8,
)

_header_bytes: Any = njit(header_bytes)


@njit(nogil=True, cache=True)
def frame_header(record: int, number: int, size: int) -> int:
    """The header of a record's frame ``number``: its base in the two lowest bits, its size in the others."""
    return load16(record + 2 * number) if _header_bytes(size) == 2 else load32(record + 4 * number)


@njit(nogil=True, cache=True)
def is_consistent(record: int, length: int, group: int, size: int) -> bool:
    """Whether the length of a record agrees with the sizes in its headers."""
    total = group * _header_bytes(size)
    if length < total:
        return False
    for number in range(group):
        total += frame_header(record, number, size) >> 2
    return bool(total == length)


@njit(nogil=True, cache=True)
def restart_before(record: int, number: int, group: int, size: int) -> tuple[int, int]:
    """The last frame up to ``number`` that is not based on the previous frame, and the address of its bytes."""
    while number > 0 and frame_header(record, number, size) & 3 == PREVIOUS:
        number -= 1
    steps = record + group * _header_bytes(size)
    for i in range(number):
        steps += frame_header(record, i, size) >> 2
    return number, steps


@njit(nogil=True, cache=True)
def follow(frame: int, reference: int, size: int, header: int, at: int, data_end: int, distances: int) -> bool:
    """Turn the frame at an address into the next one of its chain; false if its bytes at ``at`` are corrupt.

    The caller has checked by :func:`is_consistent` that all these bytes exist.

    :param data_end: The address after the last byte of all records.
    :param distances: The address of the distances of :class:`.DeltaCodec`.
    """
    kind, end = header & 3, at + (header >> 2)
    if kind == WHOLE:
        if end - at != size:
            return False
        copy(frame, at, size)
        return True
    if kind == REFERENCE:
        copy(frame, reference, size)
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
            distance = load_int(distances + 8 * source)
            if position + length > size or distance > position:
                return False
            target = frame + position
            if source == 0:
                copy_some(target, reference + position, length)
            elif distance >= 32:
                copy_some(target, target - distance, length)
            else:
                repeat(target, distance, length)
            position += length
        if position + n_literals > size or at + n_literals > end:
            return False
        if at + VECTOR_BYTES <= data_end:
            copy_some(frame + position, at, n_literals)
        else:  # a vector might reach beyond the end of the arena
            for byte in range(n_literals):
                store8(frame + position + byte, load8(at + byte))
        position += n_literals
        at += n_literals
    return bool(at == end)


@njit(nogil=True, cache=True)
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
    data_at, data_end = address(data), address(data) + data.shape[0]
    for row in range(len(starts)):
        start, length, number = starts[row], lengths[row], references[row]
        if start < 0 or length < 0 or start > data.shape[0] - length:
            return row
        record, target = data_at + start, address(out) + row * group * size
        if length == group * size:
            copy(target, record, length)
            continue
        if not is_consistent(record, length, group, size) or not 0 <= number < table.shape[0]:
            return row
        reference = address(table) + number * 4 * table.shape[1]
        copy(address(frame), reference, size)
        steps = record + group * _header_bytes(size)
        for i in range(group):
            header = frame_header(record, i, size)
            if not follow(address(frame), reference, size, header, steps, data_end, address(distances)):
                return row
            copy(target, address(frame), size)
            target, steps = target + size, steps + (header >> 2)
    return len(starts)


def compile_all() -> None:
    # Not where it is defined: the kernels that gather batches import this module, but do not need this function.
    if not decode.signatures:
        decode.compile(INT(STORED, INTS, INTS, INTS, FRAMES, WORDS_2D, INTS))
        decode.disable_compile()
