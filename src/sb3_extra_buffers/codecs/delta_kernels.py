"""Compiled form of :mod:`.delta`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.codecs.delta_format import COUNT_MASK, KIND_SHIFT, PREVIOUS, REFERENCE, WHOLE, ZERO

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


@njit(nogil=True, cache=True)
def _patch(frame: Words, data: Bytes, words_at: int, skips_at: int, count: int) -> bool:
    """Apply one frame's changes to ``frame``; false if they do not fit into it."""
    words = data[words_at : words_at + 4 * count].view(np.uint32)
    skips = data[skips_at : skips_at + count]
    # Places only grow, so the last one tells whether all are inside.
    last = count - 1
    for i in range(count):
        last += skips[i]
    if last >= frame.shape[0]:
        return False
    # Unsigned, because numba otherwise allows for negative indices at every step.
    at = np.uint64(0)
    for i in range(count):
        at += np.uint64(skips[i])
        frame[at] = words[i]
        at += np.uint64(1)
    return True


@njit(nogil=True, cache=True)
def _sections(data: Bytes, start: int, length: int, group: int, n_words: int) -> tuple[int, int]:
    """Where a record's words and skips begin, or -1 if its length does not agree with its counts."""
    if start < 0 or length < 4 * group or start + length > data.shape[0]:
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
def _walk(
    lane: int,
    begin: int,
    stop: int,
    row: int,
    firsts: Indices,
    outs_0: Bytes,
    outs_1: Bytes,
    ring: Bytes,
    encoded: Indices,
    data: Bytes,
    starts: Indices,
    lengths: Words,
    references: Words,
    table: Words,
    group: int,
    frame: Words,
) -> bool:
    """Visit the frames ``begin`` to ``stop - 1`` of a lane in order and copy each to wherever it is wanted."""
    stack, frame_bytes = outs_0.shape[1], outs_0.shape[2]
    n_words = table.shape[1]
    record_bytes = group * frame_bytes
    frame_as_bytes = frame.view(np.uint8)
    record = np.int64(-1)
    raw = False
    start, words_at, skips_at, next_in_record = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    reference = np.int64(0)
    for number in range(begin, stop):
        if number >= encoded[lane]:
            source = ring[lane, number % ring.shape[1]]
        else:
            if number // group != record:
                record = number // group
                slot = record % starts.shape[1]
                start = starts[lane, slot]
                length = np.int64(lengths[lane, slot])
                raw = length == record_bytes
                next_in_record = 0
                if raw:
                    if start < 0 or start + length > data.shape[0]:
                        return False
                else:
                    words_at, skips_at = _sections(data, start, length, group, n_words)
                    reference = np.int64(references[lane, slot])
                    if words_at < 0 or reference >= table.shape[0]:
                        return False
                    for at in range(n_words):
                        frame[at] = table[reference, at]
            if raw:
                at = start + (number % group) * frame_bytes
                source = data[at : at + frame_bytes]
            else:
                counts = data[start : start + 4 * group].view(np.uint32)
                while next_in_record <= number % group:
                    kind = np.int64(counts[next_in_record]) >> KIND_SHIFT
                    count = np.int64(counts[next_in_record]) & COUNT_MASK
                    if kind == WHOLE:
                        whole = data[words_at : words_at + 4 * n_words].view(np.uint32)
                        for at in range(n_words):
                            frame[at] = whole[at]
                        words_at += 4 * n_words
                    else:
                        if kind == REFERENCE:
                            for at in range(n_words):
                                frame[at] = table[reference, at]
                        elif kind == ZERO:
                            for at in range(n_words):
                                frame[at] = 0
                        if not _patch(frame, data, words_at, skips_at, count):
                            return False
                        words_at += 4 * count
                        skips_at += count
                    next_in_record += 1
                source = frame_as_bytes[:frame_bytes]
        place = number - firsts[0, row]
        if 0 <= place < stack:
            target = outs_0[row, place]
            for byte in range(frame_bytes):
                target[byte] = source[byte]
        if firsts.shape[0] > 1:
            place = number - firsts[1, row]
            if 0 <= place < stack:
                target = outs_1[row, place]
                for byte in range(frame_bytes):
                    target[byte] = source[byte]
    return True


@njit(nogil=True, cache=True)
def gather(
    lanes: Indices,
    firsts: Indices,
    outs_0: Bytes,
    outs_1: Bytes,
    ring: Bytes,
    encoded: Indices,
    data: Bytes,
    starts: Indices,
    lengths: Words,
    references: Words,
    table: Words,
    group: int,
    low: int,
    high: int,
) -> bool:
    """Rows ``low`` to ``high - 1`` of :meth:`sb3_extra_buffers.codecs.base.Codec.gather`; false if bytes are corrupt.

    With two rows in ``firsts``, ``outs_1`` is filled as well, in one visit where the two runs of frames meet.
    """
    stack = outs_0.shape[1]
    frame = np.empty(table.shape[1], dtype=np.uint32)
    for row in range(low, high):
        begin, stop = firsts[0, row], firsts[0, row] + stack
        if firsts.shape[0] > 1:
            other = firsts[1, row]
            if begin <= other <= stop:
                stop = other + stack
            elif not _walk(
                lanes[row], other, other + stack, row, firsts, outs_0, outs_1,
                ring, encoded, data, starts, lengths, references, table, group, frame,
            ):  # fmt: skip
                return False
        if not _walk(
            lanes[row], begin, stop, row, firsts, outs_0, outs_1,
            ring, encoded, data, starts, lengths, references, table, group, frame,
        ):  # fmt: skip
            return False
    return True


def compile_all() -> None:
    words = np.zeros((1, 1, 1), dtype=np.uint32)
    out = np.zeros(8, dtype=np.uint8)
    lengths = np.zeros(1, dtype=np.int64)
    encode(words, words[0], 4, out, lengths)
    frames, index = np.zeros((1, 1, 4), dtype=np.uint8), np.zeros((1, 1), dtype=np.uint32)
    gather(
        lengths, np.zeros((1, 1), dtype=np.int64), frames, frames, frames, lengths, out,
        np.zeros((1, 1), dtype=np.int64), index, index, words[0], 1, 0, 0,
    )  # fmt: skip
