"""Compiled form of :mod:`.packed_frames`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only.

``planes`` says which codec the records are of: it is 0 for ``bitpack``, and 1 or 3 for ``pixel-lz``.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from sb3_extra_buffers.codecs import bitpack_kernels, pixel_lz_kernels
from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.codecs.bitpack import BitpackCodec
from sb3_extra_buffers.codecs.memory_kernels import (
    FRAMES,
    INT,
    INTS,
    INTS_2D,
    STORED,
    VECTOR_BYTES,
    address,
    copy,
    load32,
    store8,
    store32,
)
from sb3_extra_buffers.codecs.pixel_lz import PixelLzCodec

_STORED_FRAMES = types.Array(types.uint8, 3, "C", readonly=True)
_BITPACK_PADDING, _PIXEL_LZ_PADDING = BitpackCodec.padding, PixelLzCodec.padding
SCRATCH_BYTES = 3 * VECTOR_BYTES
"""Decoding a frame takes scratch memory of its size, and this many bytes more."""

_pack_bits, _unpack_bits = bitpack_kernels.pack_frame, bitpack_kernels.unpack_frame
_pack_pixels, _unpack_pixels = pixel_lz_kernels.pack_frame, pixel_lz_kernels.unpack_frame


@njit(nogil=True, cache=True)
def unpack_frame(
    target: int,
    size: int,
    record: int,
    length: int,
    number: int,
    group: int,
    predictors: int,
    planes: int,
    scratch: int,
) -> bool:
    """Decode frame ``number`` of a record; false if it is corrupt.

    :param predictors: The address of the predictors of ``bitpack``.
    :param planes: The planes of ``pixel-lz``; 0 for records of ``bitpack``.
    :param scratch: Memory for a frame and :data:`SCRATCH_BYTES` more.
    """
    padding = _PIXEL_LZ_PADDING if planes else _BITPACK_PADDING
    end = record + 4 * group
    if length < 4 * group + padding:
        return False
    begin, stop = end, end
    for i in range(group):
        frame_bytes = load32(record + 4 * i)
        if i == number:
            begin, stop = end, end + frame_bytes
        end += frame_bytes
    if end + padding != record + length:
        return False
    if planes:
        return _unpack_pixels(target, size, begin, stop, planes, scratch)
    return _unpack_bits(target, size, begin, stop, predictors)


@njit(INT(_STORED_FRAMES, INTS_2D, INT, INT, types.uint8[::1], INTS), nogil=True, cache=True)
def encode(records: Bytes, predictors: Indices, planes: int, row_bytes: int, out: Bytes, lengths: Indices) -> int:
    """Encode records, given as frames, to ``out``. Returns the size of all encoded records together."""
    group, size = records.shape[1], records.shape[2]
    begin = np.int64(address(out))
    end = begin
    padding = _PIXEL_LZ_PADDING if planes else _BITPACK_PADDING
    for row in range(len(records)):
        record = address(records) + row * group * size
        at = end + 4 * group
        for i in range(group):
            if planes:
                length = _pack_pixels(record + i * size, size, at, planes, row_bytes)
            else:
                length = _pack_bits(record + i * size, size, at, address(predictors))
            store32(end + 4 * i, length)
            at += length
        for i in range(padding):
            store8(at + i, 0)
        lengths[row] = at + padding - end
        if lengths[row] >= group * size:
            lengths[row] = group * size
            copy(end, record, group * size)
        end += lengths[row]
    return end - begin


@njit(INT(STORED, INTS, INTS, FRAMES, INTS_2D, INT), nogil=True, cache=True)
def decode(data: Bytes, starts: Indices, lengths: Indices, out: Bytes, predictors: Indices, planes: int) -> int:
    """Decode records into ``out[i]``. Returns the number of the first invalid one, or ``len(starts)``."""
    group, size = out.shape[1], out.shape[2]
    scratch = np.empty(size + SCRATCH_BYTES, dtype=np.uint8)
    for row in range(len(starts)):
        start, length = starts[row], lengths[row]
        if start < 0 or length < 0 or start > len(data) - length:
            return row
        record, target = address(data) + start, address(out) + row * group * size
        if length == group * size:
            copy(target, record, length)
            continue
        for i in range(group):
            if not unpack_frame(
                target + i * size, size, record, length, i, group, address(predictors), planes, address(scratch)
            ):
                return row
    return len(starts)


def compile_all() -> None:
    """Nothing to do: functions with declared types are compiled when they are defined."""
