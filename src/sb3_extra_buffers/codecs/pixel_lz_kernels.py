"""Compiled form of :mod:`.pixel_lz`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only.

A decoder that asks "is there more to copy?" makes the processor predict the answer. In images, the prediction is often
wrong, which costs tens of cycles. This decoder does not ask: each step writes 16 literals and 32 copied pixels, and the
next step overwrites those that were too many. All places in memory are addresses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.codecs.memory_kernels import (
    BYTE,
    INTEGER,
    VECTOR_BYTES,
    address,
    copy,
    copy16,
    emit_load,
    emit_repeated,
    emit_store,
    load8,
    load32,
    load64,
    load_int,
    n_equal_bytes,
    store8,
    store32,
)
from sb3_extra_buffers.codecs.pixel_lz import LONGEST_COPY, LONGEST_DISTANCE, MOST_LITERALS, STEP_BYTES

_PIXELS = ir.VectorType(BYTE, LONGEST_COPY + 1)
_HASH_BITS, _MULTIPLIER = 12, np.uint64(0x9E3779B97F4A7C15)
_TABLE_BYTES = 4 << _HASH_BITS
_FIXED, _RECENT = 2, 6
"""How many distances are always tried (to the previous pixel, and to the row above), and how many recently used ones
are tried right after a copy."""
_SLOW_DISTANCE = 64
"""Copies from fewer pixels away are slow: they read bytes that were just written, and the processor has to wait."""
_SKIP_TRIGGER = 6
"""After ``2**_SKIP_TRIGGER`` pixels without a copy, the encoder no longer looks for a copy at every pixel."""


def _copy_pixels(typing_context: Any, target: Any, distance: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, distance = arguments
        source = builder.sub(target, distance)
        repeated = emit_repeated(builder, emit_load(builder, source, BYTE), _PIXELS)
        is_run = builder.icmp_signed("==", distance, ir.Constant(INTEGER, 1))
        emit_store(builder, builder.select(is_run, repeated, emit_load(builder, source, _PIXELS)), target)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


copy_pixels: Any = intrinsic(_copy_pixels)
"""``copy_pixels(target, distance)``: copy 32 bytes from ``distance`` before ``target``. If that is 1, repeat the byte
before ``target``."""


@njit(nogil=True, cache=True)
def unpack_frame(target: int, size: int, at: int, end: int, planes: int, scratch: int) -> bool:
    """Decode the bytes from ``at`` to ``end`` to the frame at ``target``; false if they are corrupt.

    :param scratch: Memory for the frame and :data:`.VECTOR_BYTES` more for each plane.
    """
    n_pixels, position = size // planes, np.int64(0)
    # Steps may write beyond the end of a plane, so there is room between the planes.
    second = scratch + n_pixels + VECTOR_BYTES
    third = second + n_pixels + VECTOR_BYTES
    while at < end:
        end -= STEP_BYTES
        step = load32(end)
        n_literals, n_copied, distance = step & 15, (step >> 4) & 31, (step >> 9) & LONGEST_DISTANCE
        literals, copied = position, position + n_literals
        position = copied + n_copied
        if at + planes * n_literals > end or position > n_pixels or distance > copied:
            return False
        if n_copied > distance and distance != 1:
            return False
        # The literals of all planes come first, because the processor has to wait for bytes that were just written.
        copy16(scratch + literals, at)
        if planes == 3:
            copy16(second + literals, at + n_literals)
            copy16(third + literals, at + 2 * n_literals)
        copy_pixels(scratch + copied, distance)
        if planes == 3:
            copy_pixels(second + copied, distance)
            copy_pixels(third + copied, distance)
        at += planes * n_literals
    for plane in range(planes):
        copy(target + plane * n_pixels, scratch + plane * (n_pixels + VECTOR_BYTES), n_pixels)
    return at == end and position == n_pixels


@njit(nogil=True, cache=True)
def pack_frame(frame: int, size: int, out: int, planes: int, row: int) -> int:
    """Encode a frame to ``out``, and return the number of bytes written.

    :param row: Pixels from one row of an image to the next; 0 if unknown.
    """
    n_pixels, shift = size // planes, 2 if planes == 3 else 0
    pixels = _interleave_planes(frame, n_pixels, planes)
    steps = np.empty(STEP_BYTES * (n_pixels + 1) + 1, dtype=np.uint8)
    tables = np.zeros(2 * _TABLE_BYTES, dtype=np.uint8)
    distances = np.zeros(_FIXED + _RECENT, dtype=np.int64)
    distances[0], distances[1] = 1, row
    shortest = 2 if planes == 3 else 4  # fewer pixels take no more bytes than a step
    end, steps_end = out, address(steps)
    place, done = 0, 0
    while place < n_pixels:
        n_tried = _FIXED + _RECENT if place == done else _FIXED  # an earlier distance often serves again after a copy
        length, distance = _find_copy(
            address(pixels), n_pixels, shift, place, address(tables), address(distances), n_tried
        )
        if length < shortest:
            place += 1 + ((place - done) >> _SKIP_TRIGGER)
            continue
        steps_end, end = _add_steps(steps_end, end, frame + done, n_pixels, planes, place - done, length, distance)
        _move_to_front(distances, distance)
        place += length
        done = place
    if done < n_pixels:
        steps_end, end = _add_steps(steps_end, end, frame + done, n_pixels, planes, n_pixels - done, 0, 0)
    while steps_end > address(steps):
        steps_end -= STEP_BYTES
        for byte in range(STEP_BYTES):
            store8(end + byte, load8(steps_end + byte))
        end += STEP_BYTES
    return end - out


@njit(nogil=True, cache=True)
def _add_steps(
    steps: int, out: int, literals: int, n_pixels: int, planes: int, n_literals: int, n_copied: int, distance: int
) -> tuple[int, int]:
    """Write literals to ``out``, and the steps for them and for the copy after them to ``steps``.

    Returns where the next steps and literals go.
    """
    while n_literals > 0 or n_copied > 0:
        some = min(n_literals, MOST_LITERALS)
        for plane in range(planes):
            for i in range(some):
                store8(out + i, load8(literals + plane * n_pixels + i))
            out += some
        literals, n_literals = literals + some, n_literals - some
        if n_literals > 0:
            store32(steps, some)
        else:
            copied = min(n_copied, LONGEST_COPY)
            store32(steps, some | copied << 4 | distance << 9)
            n_copied -= copied
        steps += STEP_BYTES
    return steps, out


@njit(nogil=True, cache=True)
def _interleave_planes(frame: int, n_pixels: int, planes: int) -> Bytes:
    """The pixels of a frame, followed by zeros. Pixels of RGB images become 4 bytes each: red, green, blue, 0."""
    size = 4 * n_pixels if planes == 3 else n_pixels
    pixels = np.empty(size + 2 * VECTOR_BYTES, dtype=np.uint8)
    pixels[size:] = 0
    if planes == 1:
        copy(address(pixels), frame, n_pixels)
        return pixels
    for i in range(n_pixels):
        green, blue = load8(frame + n_pixels + i), load8(frame + 2 * n_pixels + i)
        store32(address(pixels) + 4 * i, load8(frame + i) | green << 8 | blue << 16)
    return pixels


@njit(nogil=True, cache=True, inline="always")
def _find_copy(
    pixels: int, n_pixels: int, shift: int, place: int, tables: int, distances: int, n_distances: int
) -> tuple[int, int]:
    """Find the best copy for a place. Returns its length and distance; the length is 0 if there is none.

    Two earlier places come from hash tables: the first one with the same few pixels, and the last one with the same few
    more pixels. If neither makes a long copy, the most likely distances are tried.

    The function is inlined and gets addresses: calling it with arrays would add a large part to the time of the search.
    """
    here = pixels + (place << shift)
    prefix, longer_prefix = _load_prefix(here, shift), load64(here)
    if shift:
        longer_prefix ^= load64(here + 4) * _MULTIPLIER  # of three pixels
    first_entry, last_entry = tables + _entry(prefix), tables + _TABLE_BYTES + _entry(longer_prefix)
    met_first, met_last = load32(first_entry) - 1, load32(last_entry) - 1
    # Copies from far away are decoded faster, so the first place is kept, unless other pixels share its entry.
    if met_first < 0 or _load_prefix(pixels + (met_first << shift), shift) != prefix:
        store32(first_entry, place + 1)
    store32(last_entry, place + 1)
    limit, best = n_pixels - place, (0, 0)
    if met_first >= 0:
        best = _better_copy(here, prefix, shift, place, limit, place - met_first, best)
    if met_last >= 0:
        best = _better_copy(here, prefix, shift, place, limit, place - met_last, best)
    if best[0] > LONGEST_COPY:
        return best
    for i in range(n_distances):
        best = _better_copy(here, prefix, shift, place, limit, load_int(distances + 8 * i), best)
    return best


@njit(nogil=True, cache=True)
def _load_prefix(place: int, shift: int) -> int:
    """The fewest pixels that are worth a copy: two of an RGB image, or four bytes."""
    return load64(place) if shift else np.uint64(load32(place))


@njit(nogil=True, cache=True)
def _entry(pixels: int) -> int:
    """The offset of a hash table's entry for some pixels. An entry is a place plus 1; 0 means that there is none."""
    return np.int64((np.uint64(pixels) * _MULTIPLIER) >> np.uint64(64 - _HASH_BITS)) * 4


@njit(nogil=True, cache=True)
def _better_copy(
    here: int, prefix: int, shift: int, place: int, limit: int, distance: int, best: tuple[int, int]
) -> tuple[int, int]:
    """Return the better one of two copies: the one from a distance, or ``best``.

    :param prefix: The pixels at ``here`` that any copy has to begin with.
    """
    if distance <= 0 or distance > min(place, LONGEST_DISTANCE):
        return best
    there = here - (distance << shift)
    if _load_prefix(there, shift) != prefix:
        return best
    if 1 < distance <= LONGEST_COPY:
        limit = min(limit, distance)
    length = n_equal_bytes(here, there, 0, limit << shift) >> shift
    is_longer = length - (distance < _SLOW_DISTANCE) > best[0] - (best[1] < _SLOW_DISTANCE)
    return (length, distance) if is_longer else best


@njit(nogil=True, cache=True)
def _move_to_front(distances: Indices, distance: int) -> None:
    """Move a distance to the front of the recently used ones."""
    at = _FIXED
    while at < _FIXED + _RECENT - 1 and distances[at] != distance:
        at += 1
    while at > _FIXED:
        distances[at] = distances[at - 1]
        at -= 1
    distances[_FIXED] = distance
