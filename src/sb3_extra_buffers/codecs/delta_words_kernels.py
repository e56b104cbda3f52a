"""Compiled form of :mod:`.delta_words`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only."""

from __future__ import annotations

import numpy as np
from numba import njit

from sb3_extra_buffers.codecs.base import Bytes, Indices, Words
from sb3_extra_buffers.codecs.chains import PREVIOUS, REFERENCE, WHOLE, ZERO
from sb3_extra_buffers.codecs.delta_words import COUNT_MASK, KIND_SHIFT
from sb3_extra_buffers.codecs.memory_kernels import FRAMES, INT, INTS, STORED, WORDS_2D


@njit(nogil=True, cache=True)
def _find_changes(frame: Words, base: Words, changed: Words, skips: Bytes) -> int:
    """Write the words of ``frame`` that differ from ``base``, and the gaps before them; return their number."""
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
    """Encode records ``words[i]`` relative to the reference frames ``bases[i]`` into ``out``; return their size."""
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
            if 8 * count > n_words:  # as at the start of an episode: the reference or zeros may be closer
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


@njit(nogil=True, cache=True)
def _patch(frame: Words, data: Bytes, words_at: int, skips_at: int, count: int) -> bool:
    """Apply one frame's changes to ``frame``; false if they do not fit into it."""
    words = data[words_at : words_at + 4 * count].view(np.uint32)
    skips = data[skips_at : skips_at + count]
    # Places only grow, so if the last one is inside, all are.
    last = count - 1
    for i in range(count):
        last += skips[i]
    if last >= frame.shape[0]:
        return False
    # Unsigned, because numba checks whether signed indices are negative.
    at = np.uint64(0)
    for i in range(count):
        at += np.uint64(skips[i])
        frame[at] = words[i]
        at += np.uint64(1)
    return True


@njit(nogil=True, cache=True)
def sections(data: Bytes, start: int, length: int, group: int, n_words: int) -> tuple[int, int]:
    """Where a delta record's words and skips begin, or -1 if its length does not agree with its counts."""
    if length < 4 * group:
        return -1, -1
    counts = data[start : start + 4 * group].view(np.uint32)
    n_changed, n_skips = 0, 0
    for i in range(group):
        count = np.int64(counts[i]) & COUNT_MASK
        if np.int64(counts[i]) >> KIND_SHIFT == WHOLE:
            n_changed += n_words
        elif count <= n_words:
            n_changed += count
            n_skips += count
        else:
            return -1, -1
    if 4 * group + 4 * n_changed + n_skips != length:
        return -1, -1
    return start + 4 * group, start + 4 * group + 4 * n_changed


@njit(nogil=True, cache=True)
def follow(
    frame: Words, data: Bytes, header: int, words_at: int, skips_at: int, table: Words, reference: int
) -> tuple[int, int]:
    """Turn ``frame`` into the next one of its chain. Returns where the one after it begins, or -1 if corrupt."""
    n_words = frame.shape[0]
    kind, count = header >> KIND_SHIFT, header & COUNT_MASK
    if kind == WHOLE:
        whole = data[words_at : words_at + 4 * n_words].view(np.uint32)
        for at in range(n_words):
            frame[at] = whole[at]
        return words_at + 4 * n_words, skips_at
    if kind == REFERENCE:
        for at in range(n_words):
            frame[at] = table[reference, at]
    elif kind == ZERO:
        for at in range(n_words):
            frame[at] = 0
    if not _patch(frame, data, words_at, skips_at, count):
        return -1, -1
    return words_at + 4 * count, skips_at + count


@njit(INT(STORED, INTS, INTS, INTS, FRAMES, WORDS_2D), nogil=True, cache=True)
def decode(data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes, table: Words) -> int:
    """Decode records into ``out[i]``. Returns the number of the first invalid one, or ``len(starts)``."""
    group, frame_bytes = out.shape[1], out.shape[2]
    n_words = table.shape[1]
    frame = np.empty(n_words, dtype=np.uint32)
    frame_as_bytes = frame.view(np.uint8)
    for row in range(len(starts)):
        start, length, reference = starts[row], lengths[row], references[row]
        if start < 0 or length < 0 or start > data.shape[0] - length:
            return row
        if length == group * frame_bytes:
            for i in range(group):
                for byte in range(frame_bytes):
                    out[row, i, byte] = data[start + i * frame_bytes + byte]
            continue
        words_at, skips_at = sections(data, start, length, group, n_words)
        if words_at < 0 or not 0 <= reference < table.shape[0]:
            return row
        counts = data[start : start + 4 * group].view(np.uint32)
        for at in range(n_words):
            frame[at] = table[reference, at]
        for i in range(group):
            words_at, skips_at = follow(frame, data, np.int64(counts[i]), words_at, skips_at, table, reference)
            if words_at < 0:
                return row
            for byte in range(frame_bytes):
                out[row, i, byte] = frame_as_bytes[byte]
    return len(starts)


def compile_all() -> None:
    words = np.zeros((1, 1, 1), dtype=np.uint32)
    encode(words, words[0], 4, np.zeros(8, dtype=np.uint8), np.zeros(1, dtype=np.int64))
