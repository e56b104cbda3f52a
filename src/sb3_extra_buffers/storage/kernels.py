"""Compiled inner loops of the store. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only."""

from __future__ import annotations

import numpy as np
from numba import njit

_BLOCK = 256  # bytes compared between two looks at the result: long enough to be vectorised, short enough to stop early


@njit(nogil=True, cache=True, inline="always")
def _equal(left, right):
    size = left.shape[0]
    start = 0
    while start < size:
        stop = min(start + _BLOCK, size)
        difference = np.uint8(0)
        for i in range(start, stop):
            difference |= left[i] ^ right[i]
        if difference != 0:
            return False
        start = stop
    return True


@njit(nogil=True, cache=True)
def append_unless_known(lanes, observations, ring, heads, floors, encoded, ends):
    """See :func:`sb3_extra_buffers.storage.matching.append_unless_known`."""
    stack, frame_bytes, ring_size = observations.shape[1], observations.shape[2], ring.shape[1]
    most_waiting = 0
    for row in range(lanes.shape[0]):
        lane = lanes[row]
        head = heads[lane]
        new = 0
        while new < stack:
            first = head - stack + new
            known = first >= floors[lane]
            i = 0
            while known and i < stack - new:
                known = _equal(ring[lane, (first + i) % ring_size], observations[row, i])
                i += 1
            if known:
                break
            new += 1
        for i in range(stack - new, stack):
            target = ring[lane, head % ring_size]
            for byte in range(frame_bytes):
                target[byte] = observations[row, i, byte]
            head += 1
        heads[lane] = head
        ends[row] = head
        most_waiting = max(most_waiting, head - encoded[lane])
    return most_waiting


def compile_all() -> None:
    numbers = np.zeros(1, dtype=np.int64)
    frames = np.zeros((1, 1, 1), dtype=np.uint8)
    append_unless_known(numbers, frames, frames.copy(), numbers.copy(), numbers, numbers, numbers.copy())
