"""Compiled form of :mod:`.indexed_colour`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from sb3_extra_buffers.codecs.base import Bytes, Indices


@njit(nogil=True, cache=True)
def _key(red: np.uint8, green: np.uint8, blue: np.uint8) -> np.uint32:
    """A colour in the hash table, in which 0 is an empty slot."""
    return ((np.uint32(red) << 16) | (np.uint32(green) << 8) | np.uint32(blue)) + np.uint32(1)


@njit(nogil=True, cache=True)
def _slot(keys: npt.NDArray[np.uint32], key: np.uint32) -> np.uint32:
    """The slot of a colour in the hash table, or the empty slot that it would take."""
    mask = np.uint32(keys.shape[0] - 1)
    slot = np.uint32((np.uint32(key) * np.uint32(2654435761)) >> np.uint32(20)) & mask
    while keys[slot] != key and keys[slot] != 0:
        slot = np.uint32(slot + 1) & mask
    return slot


@njit(nogil=True, cache=True)
def to_indices(
    records: Bytes,
    group: int,
    channels_last: bool,
    keys: npt.NDArray[np.uint32],
    values: Bytes,
    palette: Bytes,
    n_colours: Indices,
    indices: Bytes,
    indexed: npt.NDArray[np.bool_],
) -> None:
    """Replace colours by indices, and add new ones to the palette.

    ``indexed`` is false for records whose new colours do not all fit. They add none.
    """
    pixels = indices.shape[1] // group
    between, across = (1, 3) if channels_last else (pixels, 1)
    for row in range(records.shape[0]):
        fits, n_before = True, n_colours[0]
        last_key, last_value = np.uint32(0), np.uint8(0)
        for frame in range(group):
            at = frame * 3 * pixels
            for pixel in range(pixels):
                red, green, blue = records[row, at], records[row, at + between], records[row, at + 2 * between]
                at += across
                key = _key(red, green, blue)
                if key != last_key:  # neighbouring pixels often have the same colour
                    slot = _slot(keys, key)
                    if keys[slot] == 0:
                        count = n_colours[0]
                        if count == palette.shape[0]:
                            fits = False
                            break
                        keys[slot] = key
                        values[slot] = count
                        palette[count, 0], palette[count, 1], palette[count, 2] = red, green, blue
                        n_colours[0] = count + 1
                    last_key, last_value = key, values[slot]
                indices[row, frame * pixels + pixel] = last_value
            if not fits:
                while n_colours[0] > n_before:  # the last one first, as later slots depend on those filled before
                    n_colours[0] -= 1
                    colour = palette[n_colours[0]]
                    keys[_slot(keys, _key(colour[0], colour[1], colour[2]))] = 0
                break
        indexed[row] = fits


@njit(nogil=True, cache=True)
def to_colours(indices: Bytes, group: int, channels_last: bool, palette: Bytes, rows: Indices, out: Bytes) -> None:
    """Write the pixels of ``indices[i]`` to row ``rows[i]`` of ``out``."""
    pixels = indices.shape[1] // group
    for i in range(rows.shape[0]):
        target = out[rows[i]]
        for frame in range(group):
            source = indices[i, frame * pixels : (frame + 1) * pixels]
            start = frame * 3 * pixels
            if channels_last:
                for pixel in range(pixels):
                    colour = palette[source[pixel]]
                    at = start + 3 * pixel
                    target[at], target[at + 1], target[at + 2] = colour[0], colour[1], colour[2]
            else:
                for channel in range(3):
                    plane = target[start + channel * pixels : start + (channel + 1) * pixels]
                    for pixel in range(pixels):
                        plane[pixel] = palette[source[pixel], channel]


def compile_all() -> None:
    records, indices = np.zeros((1, 3), dtype=np.uint8), np.zeros((1, 1), dtype=np.uint8)
    palette, numbers = np.zeros((1, 3), dtype=np.uint8), np.zeros(1, dtype=np.int64)
    keys, indexed = np.zeros(2, dtype=np.uint32), np.zeros(1, dtype=np.bool_)
    to_indices(records, 1, False, keys, np.zeros(2, dtype=np.uint8), palette, numbers.copy(), indices, indexed)
    to_colours(indices, 1, False, palette, numbers, records)
