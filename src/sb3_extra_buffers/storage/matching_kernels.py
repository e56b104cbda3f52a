"""Compiled form of :mod:`.matching`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from sb3_extra_buffers.codecs.base import Bytes, Indices

# Eight bytes are compared at a time, and differences are checked once per block: the compiler vectorises that best.
_BLOCK_WORDS = 512


@njit(nogil=True, cache=True)
def _equal(left: Bytes, right: Bytes, size: int) -> bool:
    n_words = size // 8
    left_words, right_words = left[: 8 * n_words].view(np.uint64), right[: 8 * n_words].view(np.uint64)
    start = 0
    while start < n_words:
        some_left, some_right = left_words[start : start + _BLOCK_WORDS], right_words[start : start + _BLOCK_WORDS]
        difference = np.uint64(0)
        for i in range(some_left.shape[0]):
            difference |= some_left[i] ^ some_right[i]
        if difference != 0:
            return False
        start += _BLOCK_WORDS
    rest = np.uint8(0)
    for i in range(8 * n_words, size):
        rest |= left[i] ^ right[i]
    return rest == 0


@njit(nogil=True, cache=True)
def _equal_where(left: Bytes, right: Bytes, size: int, mask: npt.NDArray[np.uint64]) -> bool:
    """Compare only the bytes that the repeated ``mask`` selects."""
    n_words, block = size // 8, mask.shape[0]
    left_words, right_words = left[: 8 * n_words].view(np.uint64), right[: 8 * n_words].view(np.uint64)
    start = 0
    while start < n_words:
        some_left, some_right = left_words[start : start + block], right_words[start : start + block]
        difference = np.uint64(0)
        for i in range(some_left.shape[0]):
            difference |= (some_left[i] ^ some_right[i]) & mask[i]
        if difference != 0:
            return False
        start += block
    mask_bytes = mask.view(np.uint8)
    rest = np.uint8(0)
    for i in range(8 * n_words, size):
        rest |= (left[i] ^ right[i]) & mask_bytes[i % mask_bytes.shape[0]]
    return rest == 0


@njit(nogil=True, cache=True)
def _extract(observation: Bytes, frame: Bytes, pixels: int, period: int, offset: int, chunk: int, item: int) -> None:
    """Copy one frame out of an observation, plane by plane."""
    if pixels == 1:
        source = observation[offset : offset + chunk]
        for i in range(chunk):
            frame[i] = source[i]
    elif period == 4 and chunk == 1:  # four gray frames: worth a loop that the compiler can vectorise
        words = observation.view(np.uint32)
        shift = np.uint32(8 * offset)
        for pixel in range(pixels):
            frame[pixel] = np.uint8((words[pixel] >> shift) & np.uint32(255))
    elif period == 3 and chunk == 3 and item == 1:  # the same for one RGB image
        red, green, blue = frame[:pixels], frame[pixels : 2 * pixels], frame[2 * pixels : 3 * pixels]
        for unsigned in range(np.uint64(pixels)):
            at = np.uint64(3) * unsigned
            red[unsigned] = observation[at]
            green[unsigned] = observation[at + np.uint64(1)]
            blue[unsigned] = observation[at + np.uint64(2)]
    elif item == 1:
        for channel in range(chunk):
            plane = frame[channel * pixels : (channel + 1) * pixels]
            for pixel in range(pixels):
                plane[pixel] = observation[pixel * period + offset + channel]
    else:
        to = 0
        for channel in range(chunk // item):
            for pixel in range(pixels):
                source_at = pixel * period + offset + channel * item
                for byte in range(item):
                    frame[to] = observation[source_at + byte]
                    to += 1


@njit(nogil=True, cache=True)
def _append_usual_pair(observation: Bytes, following: Bytes, before: Bytes, frame: Bytes) -> int:
    """Append a pair as it nearly always is with four gray frames, in one pass over the memory.

    Usually an observation equals the newest one, and its successor has at most one new frame. Returns the number of new
    frames, 0 or 1. For all other pairs, it returns -1 and has changed nothing but ``frame``.
    """
    words, next_words, old_words = observation.view(np.uint32), following.view(np.uint32), before.view(np.uint32)
    moved, start = np.uint32(0), 0
    while start < words.shape[0]:
        some, some_next = words[start : start + _BLOCK_WORDS], next_words[start : start + _BLOCK_WORDS]
        some_old, pixels = old_words[start : start + _BLOCK_WORDS], frame[start : start + _BLOCK_WORDS]
        difference = np.uint32(0)
        for i in range(some.shape[0]):
            difference |= (some[i] ^ some_old[i]) | (
                (some_next[i] & np.uint32(0xFFFFFF)) ^ (some_old[i] >> np.uint32(8))
            )
            moved |= some_next[i] ^ some_old[i]
        if difference != 0:
            for i in range(start):
                old_words[i] = words[i]
            return -1
        for i in range(some.shape[0]):
            some_old[i] = some_next[i]
        for i in range(some.shape[0]):
            pixels[i] = np.uint8((some_next[i] >> np.uint32(24)) & np.uint32(255))
        start += _BLOCK_WORDS
    return 1 if moved else 0


@njit(nogil=True, cache=True)
def append_new_frames(
    lanes: Indices,
    memory: Bytes,
    following: Bytes,
    pixels: int,
    chunk: int,
    item: int,
    stack: int,
    masks: npt.NDArray[np.uint64],
    newest: Bytes,
    known: npt.NDArray[np.bool_],
    ring: Bytes,
    heads: Indices,
    encoded: Indices,
    ends: Indices,
) -> int:
    """See :func:`sb3_extra_buffers.storage.matching.append_new_frames`."""
    ring_size, period = ring.shape[1], stack * chunk
    most_waiting = 0
    is_usual = np.zeros(lanes.shape[0], dtype=np.bool_)
    if ends.shape[0] == 2 and period == 4 and chunk == 1 and pixels > 1:
        for row in range(lanes.shape[0]):
            lane = lanes[row]
            if known[lane]:
                head = heads[lane]
                new = _append_usual_pair(memory[row], following[row], newest[lane], ring[lane, head % ring_size])
                if new >= 0:
                    is_usual[row] = True
                    ends[0, row] = head
                    ends[-1, row] = head + new
                    heads[lane] = head + new
                    most_waiting = max(most_waiting, head + new - encoded[lane])
    size = memory.shape[1]
    for which in range(ends.shape[0]):
        for row in range(lanes.shape[0]):
            if is_usual[row]:
                continue
            lane = lanes[row]
            observation, before = following[row] if which else memory[row], newest[lane]
            new = 0 if known[lane] else stack
            while new < stack:
                offset = new * chunk
                if new == 0 or pixels == 1:
                    same = _equal(observation, before[offset:], size - offset)
                else:
                    same = _equal_where(observation, before[offset:], size - offset, masks[new])
                if same:
                    break
                new += 1
            if new > 0:
                head = heads[lane]
                for i in range(stack - new, stack):
                    _extract(observation, ring[lane, head % ring_size], pixels, period, i * chunk, chunk, item)
                    head += 1
                heads[lane] = head
                for i in range(size):
                    before[i] = observation[i]
                known[lane] = True
            ends[which, row] = heads[lane]
            most_waiting = max(most_waiting, heads[lane] - encoded[lane])
    return most_waiting


def compile_all() -> None:
    numbers, memory = np.zeros(1, dtype=np.int64), np.zeros((1, 4), dtype=np.uint8)
    append_new_frames(
        numbers, memory, memory, 4, 1, 1, 1, np.zeros((1, 1), dtype=np.uint64), memory.copy(),
        np.zeros(1, dtype=np.bool_), np.zeros((1, 2, 4), dtype=np.uint8), numbers.copy(), numbers,
        np.zeros((1, 1), dtype=np.int64),
    )  # fmt: skip
