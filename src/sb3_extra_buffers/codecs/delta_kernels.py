"""Compiled encoding of :mod:`.delta`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.codecs.delta_format import KIND_SHIFT, PREVIOUS, REFERENCE, WHOLE, ZERO

Words = npt.NDArray[np.uint32]


@njit(nogil=True, cache=True)
def _find_changes(frame: Words, base: Words, changed: Words, skips: Bytes) -> int:
    """Write the words of ``frame`` that differ from ``base``, with what is skipped before each; return their number."""
    n_words = frame.shape[0]
    count = 0
    last = -1
    for start in range(0, n_words, 16):
        some, some_base = frame[start : start + 16], base[start : start + 16]
        difference = np.uint32(0)
        for i in range(some.shape[0]):
            difference |= some[i] ^ some_base[i]
        if difference == 0:
            continue
        for i in range(some.shape[0]):
            if some[i] != some_base[i]:
                at = start + i
                while at - last > 256:  # too far for one byte: write a word that did not change
                    last += 256
                    changed[count] = frame[last]
                    skips[count] = 255
                    count += 1
                changed[count] = some[i]
                skips[count] = at - last - 1
                count += 1
                last = at
    return count


@njit(nogil=True, cache=True)
def encode(words: Words, bases: Words, frame_bytes: int, out: Bytes, lengths: Indices) -> int:
    """Encode records ``words[i]`` against the frames ``bases[i]`` into ``out``, one after the other."""
    n_records, group, n_words = words.shape
    record_bytes = group * frame_bytes
    changed = np.empty(group * n_words, dtype=np.uint32)
    skips = np.empty(group * n_words, dtype=np.uint8)
    counts = np.empty(group, dtype=np.uint32)
    other_changed = np.empty(n_words, dtype=np.uint32)
    other_skips = np.empty(n_words, dtype=np.uint8)
    zero = np.zeros(n_words, dtype=np.uint32)
    position = 0
    for record in range(n_records):
        n_changed = 0
        n_skips = 0
        previous = bases[record]
        for i in range(group):
            frame = words[record, i]
            kind = PREVIOUS
            count = _find_changes(frame, previous, changed[n_changed:], skips[n_skips:])
            if 8 * count > n_words:  # a cut in the scene, an episode that begins: something else may be closer
                for other_kind, base in ((REFERENCE, bases[record]), (ZERO, zero)):
                    other_count = _find_changes(frame, base, other_changed, other_skips)
                    if other_count < count:
                        kind, count = other_kind, other_count
                        for at in range(count):
                            changed[n_changed + at] = other_changed[at]
                            skips[n_skips + at] = other_skips[at]
            if 5 * count >= 4 * n_words:
                for at in range(n_words):
                    changed[n_changed + at] = frame[at]
                n_changed += n_words
                kind, count = WHOLE, 0
            else:
                n_changed += count
                n_skips += count
            counts[i] = (kind << KIND_SHIFT) | count
            previous = frame
        length = 4 * group + 4 * n_changed + n_skips
        if length < record_bytes:
            target = out[position : position + 4 * group].view(np.uint32)
            for i in range(group):
                target[i] = counts[i]
            target = out[position + 4 * group : position + 4 * group + 4 * n_changed].view(np.uint32)
            for i in range(n_changed):
                target[i] = changed[i]
            offset = position + 4 * group + 4 * n_changed
            for i in range(n_skips):
                out[offset + i] = skips[i]
        else:
            length = record_bytes
            for i in range(group):
                frame_as_bytes = words[record, i].view(np.uint8)
                for byte in range(frame_bytes):
                    out[position + i * frame_bytes + byte] = frame_as_bytes[byte]
        lengths[record] = length
        position += length
    return position


def compile_all() -> None:
    words = np.zeros((1, 1, 1), dtype=np.uint32)
    encode(words, words[0], 4, np.zeros(8, dtype=np.uint8), np.zeros(1, dtype=np.int64))
