"""Compiled encoder of :mod:`.delta`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only.

Frames are given as addresses, because they are read in whole vectors. So wherever a frame lies, at least
:data:`.VECTOR_BYTES` more bytes can be read after it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from sb3_extra_buffers.codecs.base import Bytes, Indices, Words
from sb3_extra_buffers.codecs.chains import PREVIOUS, REFERENCE, WHOLE, ZERO
from sb3_extra_buffers.codecs.delta import (
    LONG_MATCH,
    LONGEST_MATCH,
    LONGEST_SKIP,
    MATCH_BYTES,
    MATCH_LITERALS,
    N_FOUND,
    N_SOURCES,
    SKIP_LITERALS,
    header_bytes,
)
from sb3_extra_buffers.codecs.memory_kernels import (
    VECTOR_BYTES,
    address,
    copy,
    copy64,
    count_ones,
    equal_bytes,
    leading_zeros,
    load8,
    load16,
    n_equal_bytes,
    store8,
    store16,
    trailing_zeros,
)

_BIT, _ALL = np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF)
_SHORTEST_MATCH = 5
"""Shorter matches would save no more than a byte or two, and every step takes time to decode."""
_SEARCH_ALL_EVERY = 16
"""In one of this many records, matches of all sources are searched; in the others, those of the most useful sources."""
_N_SEARCHED = 8
"""How many sources those are: the reference frame, and the distances that have saved the most bytes lately."""
_CHAIN_SHARE = 8
"""A frame may take more bytes in order to be based on the reference: as many as would otherwise have to be decoded
before it, divided by this number."""
_RECORDS, _TAKEN, _CHANGED = N_SOURCES, N_SOURCES + 1, N_SOURCES + 2
_TAKEN_BY_NEXT, _CHANGED_IN_NEXT = N_SOURCES + 3, N_SOURCES + 4
"""Places in the statistics that :class:`.DeltaCodec` keeps, after those of the sources."""

_header_bytes: Any = njit(header_bytes)


@njit(nogil=True, cache=True)
def _ones_from(mask: int, bit: int) -> int:
    return trailing_zeros(~(np.uint64(mask) >> np.uint64(bit)))


@njit(nogil=True, cache=True)
def _runs_of_four(mask: int) -> int:
    """The bits that are set and whose next three bits are set, too."""
    pairs = mask & (mask >> np.uint64(1))
    return pairs & (pairs >> np.uint64(2))


@njit(nogil=True, cache=True)
def _write_step(
    out: int, steps: int, is_match: bool, source: int, length: int, literals: int, n_literals: int
) -> tuple[int, int]:
    """Write a skip or match to ``steps``, and its literals to ``out``. Returns where the next literals and steps go."""
    if is_match:
        some = min(n_literals, MATCH_LITERALS)
        short = min(length - MATCH_BYTES, LONG_MATCH)
        store16(steps, 1 | source << 1 | short << 6 | some << 11)
        if short == LONG_MATCH:
            store8(out, length - MATCH_BYTES - LONG_MATCH)
            out += 1
    else:
        while length > LONGEST_SKIP:
            store16(steps, LONGEST_SKIP << 1)
            steps, length = steps + 2, length - LONGEST_SKIP
        some = min(n_literals, SKIP_LITERALS)
        store16(steps, length << 1 | some << 10)
    steps += 2
    while True:
        copy64(out, literals)
        out, literals, n_literals = out + some, literals + some, n_literals - some
        if n_literals == 0:
            return out, steps
        some = min(n_literals, SKIP_LITERALS)
        store16(steps, some << 10)
        steps += 2


@njit(nogil=True, cache=True)
def _write_backwards(out: int, steps: int, end: int) -> int:
    """Append the steps to the literals, the last step first. Returns the address after them."""
    while end > steps:
        end -= 2
        store16(out, load16(end))
        out += 2
    return out


@njit(nogil=True, cache=True)
def _encode_frame(
    frame: int,
    base: int,
    reference: int,
    size: int,
    distances: Indices,
    searched: Indices,
    n_searched: int,
    equal: npt.NDArray[np.uint64],
    found: Indices,
    steps: int,
    out: int,
    limit: int,
) -> int:
    """Write the literals and steps that turn ``base`` into ``frame`` to ``out``, and return how many bytes they take.

    ``frame``, ``base``, ``reference`` and ``out`` are addresses. If more than ``limit`` bytes are needed, it gives up
    and returns a larger number than ``limit``.

    It works on blocks of 64 bytes. For each source, a mask says which bytes of the block are equal to those at the
    source. So a few operations on masks find the next place where it pays to skip or to copy.

    :param searched: The sources to look for matches in; see :func:`.delta.default_distances`.
    :param equal: Scratch memory for one mask per source.
    :param found: Statistics: the bytes that matches have saved are added to their source.
    :param steps: Scratch memory for the steps.
    """
    begin, first = out, steps
    position = n_equal_bytes(frame, base, 0, size)
    if position == size:
        return 0
    # The pending step: it is written as soon as the number of its literals is known.
    is_match, source, length = False, np.int64(0), position
    literals = position
    while position < size:
        if out - begin + steps - first > limit:
            return limit + 1
        block, left = position, size - position
        inside = _ALL if left >= 64 else (_BIT << np.uint64(left)) - _BIT
        n_starts = 64 if left < 64 else 64 - _SHORTEST_MATCH + 1
        unchanged = equal_bytes(frame + block, base + block) & inside
        skips = _runs_of_four(unchanged)
        if left < 64:  # at the end of the frame, a skip of any length costs nothing
            changed_bits = 64 - leading_zeros(inside & ~unchanged)
            if changed_bits < 64:
                skips |= inside & (_ALL << np.uint64(changed_bits))
        starts = skips
        for i in range(n_searched):
            distance = distances[searched[i]]
            if distance <= block:
                other = (frame if searched[i] else reference) + block - distance
                mask = equal_bytes(frame + block, other) & inside
                starts |= _runs_of_four(mask) & (mask >> np.uint64(4))
                equal[i] = mask
            else:
                equal[i] = 0
        bit = np.int64(0)
        while bit < n_starts and (starts >> np.uint64(bit)) != 0:
            bit += trailing_zeros(starts >> np.uint64(bit))
            if bit >= n_starts:
                break
            at = block + bit
            skip = _ones_from(unchanged, bit) if (skips >> np.uint64(bit)) & _BIT else 0
            best, best_source = np.int64(0), np.int64(0)
            for i in range(n_searched):
                ones = _ones_from(equal[i], bit)
                if ones > best:
                    best, best_source = ones, searched[i]
            if skip > 0 and (skip + 2 >= best or bit + skip >= 64):  # nothing is decoded faster than a skip
                if bit + skip >= 64:
                    skip = n_equal_bytes(frame + at, base + at, skip, size - at)
                out, steps = _write_step(out, steps, is_match, source, length, frame + literals, at - literals)
                if at + skip >= size:
                    return _write_backwards(out, first, steps) - begin
                is_match, length = False, skip
            else:
                if bit + best >= 64:
                    known = best
                    for i in range(n_searched):
                        if bit + _ones_from(equal[i], bit) >= 64:
                            other = (frame if searched[i] else reference) + at - distances[searched[i]]
                            whole = n_equal_bytes(frame + at, other, known, min(size - at, LONGEST_MATCH))
                            if whole > best:
                                best, best_source = whole, searched[i]
                    best = min(best, size - at, LONGEST_MATCH)
                best = _without_unchanged_end(frame + at, base + at, best, size - at)
                out, steps = _write_step(out, steps, is_match, source, length, frame + literals, at - literals)
                is_match, source, length = True, best_source, best
                found[source] += length - 2
            literals = at + length
            bit = literals - block
        position = min(max(literals, block + n_starts), size)
    out, steps = _write_step(out, steps, is_match, source, length, frame + literals, size - literals)
    return _write_backwards(out, first, steps) - begin


@njit(nogil=True, cache=True)
def _without_unchanged_end(frame: int, base: int, length: int, left: int) -> int:
    """Return the length of a match without the unchanged bytes at its end, if a skip follows anyway."""
    if length < left and load8(frame + length) != load8(base + length):
        return length
    while length > _SHORTEST_MATCH:
        first = max(length - 64, _SHORTEST_MATCH)
        changed = ~equal_bytes(frame + first, base + first)
        if length - first < 64:
            changed &= (_BIT << np.uint64(length - first)) - _BIT
        if changed:
            return first + 64 - leading_zeros(changed)
        length = first
    return length


@njit(nogil=True, cache=True)
def _count_changes(frame: int, base: int, size: int) -> int:
    count = 0
    for at in range(0, size - 63, 64):
        count += 64 - count_ones(equal_bytes(frame + at, base + at))
    if size % 64:
        at = size - size % 64
        count += count_ones(~equal_bytes(frame + at, base + at) & ((_BIT << np.uint64(size % 64)) - _BIT))
    return count


@njit(nogil=True, cache=True)
def encode(
    records: Bytes,
    references: Indices,
    table: Words,
    group: int,
    distances: Indices,
    found: Indices,
    out: Bytes,
    lengths: Indices,
    excess: Indices,
) -> int:
    """Encode the rows of ``records``, relative to the reference frames ``table[references[i]]``, into ``out``.

    A frame is based on the previous one, or on the reference if that takes few more bytes: then it can be decoded
    without the frames before it.

    :param found: The statistics of earlier records; see :class:`.DeltaCodec`. They are updated.
    :param out: Room for all raw records, and for vectors that reach beyond them.
    :param excess: Receives how many bytes each record might save with a newer reference.
    :return: The size of all encoded records together.
    """
    record_bytes = records.shape[1]
    size = record_bytes // group
    header = _header_bytes(size)
    equal = np.empty(N_SOURCES, dtype=np.uint64)
    searched = np.empty(N_SOURCES, dtype=np.int64)
    # Vectors may reach beyond the last frame, so it is copied to memory that has room after it.
    last_frame = np.zeros(size + 2 * VECTOR_BYTES, dtype=np.uint8)
    zero = np.zeros(size + 2 * VECTOR_BYTES, dtype=np.uint8)
    attempt = np.empty(2 * size + 4 * VECTOR_BYTES, dtype=np.uint8)
    steps = np.empty(2 * size + 4 * VECTOR_BYTES, dtype=np.uint8)
    last_frame[:size] = records[len(records) - 1, record_bytes - size :]
    # numba frees an array after its last use, and using its address does not count. So the loop takes the addresses of
    # the arrays above again and again, which keeps the arrays alive.
    out_at = address(out)
    position = 0
    for record in range(len(records)):
        n_searched = _choose_sources(found, searched)
        reference = address(table) + references[record] * 4 * table.shape[1]
        at, base = position + group * header, reference
        chain = 0  # bytes that have to be decoded before a frame
        first_length, others = 0, 0
        for i in range(group):
            frame = address(records) + record * record_bytes + i * size
            if record == len(records) - 1 and i == group - 1:
                frame = address(last_frame)
            target = out_at + at
            changes = _count_changes(frame, reference, size)
            # The number of changed bytes predicts how many bytes a frame takes, so that most are encoded only once.
            changes_in_next = _count_changes(frame, base, size)
            from_previous = changes_in_next * found[_TAKEN_BY_NEXT] // max(found[_CHANGED_IN_NEXT], 1)
            spare = chain // _CHAIN_SHARE
            kind, length = PREVIOUS, size + 1
            if i == 0 or changes * found[_TAKEN] <= (from_previous + spare) * found[_CHANGED]:
                kind = PREVIOUS if i == 0 else REFERENCE
                length = _encode_frame(
                    frame, reference, reference, size, distances, searched, n_searched, equal, found, address(steps),
                    target, size,
                )  # fmt: skip
                found[_TAKEN], found[_CHANGED] = found[_TAKEN] + length, found[_CHANGED] + changes
            if i > 0 and length > from_previous + spare:
                other_length = _encode_frame(
                    frame, base, reference, size, distances, searched, n_searched, equal, found, address(steps),
                    address(attempt), size,
                )  # fmt: skip
                from_previous = other_length
                found[_TAKEN_BY_NEXT] += other_length
                found[_CHANGED_IN_NEXT] += changes_in_next
                if length > other_length + spare:
                    kind, length = PREVIOUS, other_length
                    copy(target, address(attempt), min(length, size))
            # At the start of an episode, a frame may be closer to zeros than to its reference.
            if 8 * length > size and _count_changes(frame, address(zero), size) < changes:
                other_length = _encode_frame(
                    frame, address(zero), reference, size, distances, searched, n_searched, equal, found,
                    address(steps), address(attempt), length,
                )  # fmt: skip
                if other_length < length:
                    kind, length = ZERO, other_length
                    copy(target, address(attempt), length)
            if length >= size:
                kind, length = WHOLE, size
                copy(target, frame, size)
            count = kind | length << 2
            for byte in range(header):
                out[position + i * header + byte] = (count >> (8 * byte)) & 255
            if i == 0:
                first_length = length
            else:
                others += min(from_previous, length)
            chain = length if kind != PREVIOUS or i == 0 else chain + length
            at += length
            base = frame
        excess[record] = max(first_length - others // (group - 1), 0) if group > 1 else first_length // 2
        total = at - position
        if total >= record_bytes:
            total = record_bytes
            copy(out_at + position, address(records) + record * record_bytes, record_bytes)
        lengths[record] = total
        position += total
    return position


@njit(nogil=True, cache=True)
def _choose_sources(found: Indices, searched: Indices) -> int:
    """Fill ``searched`` with the sources to look for matches in. Returns their number."""
    n_records = found[_RECORDS]
    found[_RECORDS] += 1
    if n_records % _SEARCH_ALL_EVERY == 0:
        for i in range(len(found)):
            if i != _RECORDS:
                found[i] //= 2
        for source in range(N_SOURCES):
            searched[source] = source
        return N_SOURCES
    searched[0] = 0
    for i in range(1, _N_SEARCHED):
        best = 0
        for source in range(1, N_SOURCES):
            is_new = True
            for j in range(1, i):
                is_new = is_new and searched[j] != source
            if is_new and (best == 0 or found[source] > found[best]):
                best = source
        searched[i] = best
    return _N_SEARCHED


def compile_all() -> None:
    records, numbers = np.zeros((1, 4), dtype=np.uint8), np.zeros(1, dtype=np.int64)
    table, sources = np.zeros((1, 1 + VECTOR_BYTES), dtype=np.uint32), np.zeros(N_FOUND, dtype=np.int64)
    encode(
        records, numbers, table, 1, sources, sources.copy(), np.zeros(1024, np.uint8), numbers.copy(), numbers.copy()
    )
