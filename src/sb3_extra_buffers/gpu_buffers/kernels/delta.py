"""Encodes frames in the ring as ``delta`` records, and rebuilds batches from records.

Encoding takes two launches, because the host must allocate room for the records in between: :func:`measure_delta` finds
their lengths, and :func:`write_delta` writes them. :mod:`sb3_extra_buffers.codecs.delta_words` defines their bytes. A
record is a chain of frames. In kernels, ``link`` is the position of a frame in its chain.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sb3_extra_buffers.codecs import chains
from sb3_extra_buffers.codecs import delta_words as delta_format
from sb3_extra_buffers.gpu_buffers.kernels import (
    LENGTH_BITS,
    REPORT_HEADER,
    DeviceFrames,
    Launcher,
    ObservationBatch,
    RepeatedLaunch,
    block_size,
)
from sb3_extra_buffers.gpu_buffers.kernels.gather import (
    NOT_SPECIALIZED,
    begin_frame,
    begin_report,
    copy_frame,
    every,
    find_record,
    gather_launch,
    last_mark,
    load_frame_words,
    load_header,
    load_integer,
    store_integer,
    store_words,
)

_KIND_SHIFT = tl.constexpr(delta_format.KIND_SHIFT)
_COUNT_MASK = tl.constexpr(delta_format.COUNT_MASK)
_PREVIOUS = tl.constexpr(chains.PREVIOUS)
_REFERENCE = tl.constexpr(chains.REFERENCE)
_ZERO = tl.constexpr(chains.ZERO)
_WHOLE = tl.constexpr(chains.WHOLE)
_NEWER = tl.constexpr(8)
"""How many frames before the newest one the candidate for a new reference is."""
_REACH = tl.constexpr(256)
"""The largest distance between two changes of a frame, in words: a skip is one byte."""
_LENGTH_BITS = tl.constexpr(LENGTH_BITS)
_HEADER = tl.constexpr(REPORT_HEADER)


@triton.jit
def _changed(
    ring, frame, before, base, kind, link, words, mask, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Whether words of the frame at byte ``frame`` of the ring differ from what they are relative to.

    By ``kind``, that is the previous frame at byte ``before`` of the ring, the reference frame at ``base``, or zeros.
    The previous frame of the first link is the reference frame.
    """
    follows = (kind == _PREVIOUS) & (link > 0)
    refers = (kind == _REFERENCE) | ((kind == _PREVIOUS) & (link == 0))
    expected = tl.load(base + words, mask=mask & every(refers, BLOCK), other=0)
    expected |= load_frame_words(ring, before, words, mask & every(follows, BLOCK), FRAME_BYTES)
    return mask & (load_frame_words(ring, frame, words, mask, FRAME_BYTES) != expected)


@triton.jit
def _count(ring, frame, before, base, kind, link, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many words the changes of a frame take, and which word changed last."""
    n_words: tl.constexpr = (FRAME_BYTES + 3) // 4
    count = 0
    last = -1
    for begin in range(0, n_words, BLOCK):
        word = begin + tl.arange(0, BLOCK)
        changed = _changed(ring, frame, before, base, kind, link, word, word < n_words, FRAME_BYTES, BLOCK)
        inside = (word > 0) & (word <= n_words)
        changed_before = _changed(ring, frame, before, base, kind, link, word - 1, inside, FRAME_BYTES, BLOCK)
        skipped = word - last_mark(word, changed_before, last) - 1
        count += tl.sum(tl.where(changed, 1 + skipped // _REACH, 0), 0)
        last = tl.maximum(last, tl.max(tl.where(changed, word, -1), 0))
    return count, last


@triton.jit
def _measure_reference(
    ring, lane, head, first, reference, base, row, ring_frames, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Begin the report of a lane, with the number of words that a newer reference would save in the newest frame."""
    n_words: tl.constexpr = (FRAME_BYTES + 3) // 4
    newest = (lane * ring_frames + tl.maximum(head - 1, 0) % ring_frames) * FRAME_BYTES
    earlier = (lane * ring_frames + tl.maximum(head - 1 - _NEWER, 0) % ring_frames) * FRAME_BYTES
    changes, recent_changes, not_zero = 0, 0, 0
    for begin in range(0, n_words, BLOCK):
        word = begin + tl.arange(0, BLOCK)
        mask = word < n_words
        here = load_frame_words(ring, newest, word, mask, FRAME_BYTES)
        changes += tl.sum((here != tl.load(base + word, mask=mask, other=0)).to(tl.int32), 0)
        recent_changes += tl.sum((here != load_frame_words(ring, earlier, word, mask, FRAME_BYTES)).to(tl.int32), 0)
        not_zero += tl.sum((here != 0).to(tl.int32), 0)
    # Frames of zeros, which fill up stacks after a reset, say nothing about the scene.
    saved = tl.where(not_zero > 0, changes - recent_changes, 0)
    begin_report(row, head, saved.to(tl.int64), first, reference)


@triton.jit
def _measure_record(
    ring, lane, number, base, headers, ring_frames,
    GROUP: tl.constexpr, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the length of the record that begins with frame ``number``, and store the headers of its frames."""
    n_words: tl.constexpr = (FRAME_BYTES + 3) // 4
    length = 4 * GROUP
    before = lane * 0
    for link in range(GROUP):
        position = lane * ring_frames + (number + link) % ring_frames
        frame = position * FRAME_BYTES
        kind = _PREVIOUS
        count, _ = _count(ring, frame, before, base, _PREVIOUS, link, FRAME_BYTES, BLOCK)
        if 8 * count > n_words:
            other, _ = _count(ring, frame, before, base, _REFERENCE, link, FRAME_BYTES, BLOCK)
            kind = tl.where(other < count, _REFERENCE, kind)
            count = tl.minimum(other, count)
            other, _ = _count(ring, frame, before, base, _ZERO, link, FRAME_BYTES, BLOCK)
            kind = tl.where(other < count, _ZERO, kind)
            count = tl.minimum(other, count)
        whole = 5 * count >= 4 * n_words
        length += tl.where(whole, 4 * n_words, 5 * count)
        header = tl.where(whole, _WHOLE, kind).to(tl.int64) << _KIND_SHIFT | tl.where(whole, 0, count)
        tl.store(headers + position, header.to(tl.int32))
        before = frame
    return tl.minimum(length, GROUP * FRAME_BYTES)


@triton.jit(do_not_specialize=["ring_frames", "n_records"])
def _measure(
    ring, table, heads, encoded, references, headers, report, ring_frames, n_records,
    GROUP: tl.constexpr, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    record = tl.program_id(1)
    head = tl.load(heads + lane)
    first = tl.load(encoded + lane)
    reference = tl.load(references + lane)
    base = table + reference * ((FRAME_BYTES + 3) // 4)
    row = report + lane * (_HEADER + n_records)
    if record == n_records:
        _measure_reference(ring, lane, head, first, reference, base, row, ring_frames, FRAME_BYTES, BLOCK)
    else:
        number = first + record * GROUP
        if number + GROUP <= head:
            length = _measure_record(ring, lane, number, base, headers, ring_frames, GROUP, FRAME_BYTES, BLOCK)
            tl.store(row + _HEADER + record, length.to(tl.int64))


@triton.jit
def _encode_changes(
    ring, frame, before, base, kind, link, heap, words_at, skips_at, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    n_words: tl.constexpr = (FRAME_BYTES + 3) // 4
    _, end = _count(ring, frame, before, base, kind, link, FRAME_BYTES, BLOCK)
    done = 0
    last = -1
    for begin in range(0, n_words, BLOCK):
        word = begin + tl.arange(0, BLOCK)
        mask = word < n_words
        changed = _changed(ring, frame, before, base, kind, link, word, mask, FRAME_BYTES, BLOCK)
        inside = (word > 0) & (word <= n_words)
        changed_before = _changed(ring, frame, before, base, kind, link, word - 1, inside, FRAME_BYTES, BLOCK)
        skipped = word - last_mark(word, changed_before, last) - 1
        emitted = changed | ((skipped % _REACH == _REACH - 1) & (word < end))
        rank = done + tl.cumsum(emitted.to(tl.int32), 0) - 1
        value = load_frame_words(ring, frame, word, mask, FRAME_BYTES)
        store_integer(heap, words_at + 4 * rank, value, emitted, 4)
        tl.store(heap + skips_at + rank, (skipped % _REACH).to(tl.uint8), mask=emitted)
        done += tl.sum(emitted.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(changed, word, -1), 0))


@triton.jit
def _renew_reference(
    ring, table, lane, head, reference, ring_frames, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy the newest frame of a lane to the table of reference frames."""
    n_words: tl.constexpr = (FRAME_BYTES + 3) // 4
    newest = (lane * ring_frames + tl.maximum(head - 1, 0) % ring_frames) * FRAME_BYTES
    for begin in range(0, n_words, BLOCK):
        word = begin + tl.arange(0, BLOCK)
        values = load_frame_words(ring, newest, word, word < n_words, FRAME_BYTES)
        tl.store(table + reference * n_words + word, values, mask=word < n_words)


@triton.jit(do_not_specialize=["capacity", "ring_frames", "n_records"])
def _write(
    ring, table, headers, report, orders, heap, records, encoded, heads, references, capacity, ring_frames, n_records,
    GROUP: tl.constexpr, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    n_words: tl.constexpr = (FRAME_BYTES + 3) // 4
    lane = tl.program_id(0).to(tl.int64)
    record = tl.program_id(1)
    if record == n_records:
        renewed = tl.load(orders + 2 * tl.num_programs(0) + lane)
        if renewed != 0:
            _renew_reference(ring, table, lane, tl.load(heads + lane), renewed, ring_frames, FRAME_BYTES, BLOCK)
            tl.store(references + lane, renewed)
        return
    number, start, packed = find_record(
        report, orders, lane, record, records, encoded, capacity, n_records, GROUP, RECORDS
    )  # fmt: skip
    if packed == 0:
        return
    if (packed & 0xFFFFFFFF) == GROUP * FRAME_BYTES:
        for link in range(GROUP):
            position = lane * ring_frames + (number + link) % ring_frames
            copy_frame(ring, position * FRAME_BYTES, heap, start + link * FRAME_BYTES, FRAME_BYTES, BLOCK)
        return
    base = table + (packed >> _LENGTH_BITS) * n_words
    words_at = start + 4 * GROUP
    skips_at = words_at
    for link in range(GROUP):
        header = tl.load(headers + lane * ring_frames + (number + link) % ring_frames)
        skips_at += 4 * tl.where(((header >> _KIND_SHIFT) & 3) == _WHOLE, n_words, header & _COUNT_MASK)
    before = lane * 0
    for link in range(GROUP):
        position = lane * ring_frames + (number + link) % ring_frames
        frame = position * FRAME_BYTES
        header = tl.load(headers + position)
        kind, count = (header >> _KIND_SHIFT) & 3, header & _COUNT_MASK
        for i in tl.static_range(4):
            tl.store(heap + start + 4 * link + i, ((header >> (8 * i)) & 0xFF).to(tl.uint8))
        if kind == _WHOLE:
            for begin in range(0, n_words, BLOCK):
                word = begin + tl.arange(0, BLOCK)
                value = load_frame_words(ring, frame, word, word < n_words, FRAME_BYTES)
                store_integer(heap, words_at + 4 * word, value, word < n_words, 4)
            words_at += 4 * n_words
        else:
            _encode_changes(ring, frame, before, base, kind, link, heap, words_at, skips_at, FRAME_BYTES, BLOCK)
            words_at += 4 * count
            skips_at += count
        before = frame


_launch_measure = Launcher(_measure, n_warps=4)
_launch_write = Launcher(_write, n_warps=4)


def measure_delta(frames: DeviceFrames) -> None:
    """Measure the next records of each lane. Fills :attr:`DeviceFrames.report`."""
    n_lanes, n_records = frames.report.shape[0], frames.n_records
    _launch_measure(
        frames.ring.device, (n_lanes, n_records + 1),
        (frames.ring, frames.table, frames.heads, frames.encoded, frames.references, frames.headers, frames.report),
        (frames.ring_frames, n_records), _constants(frames),
    )  # fmt: skip


def write_delta(frames: DeviceFrames) -> None:
    """Write measured records, enter them into the index, and renew references, as :attr:`DeviceFrames.orders` says."""
    n_lanes, n_records = frames.report.shape[0], frames.n_records
    _launch_write(
        frames.ring.device, (n_lanes, n_records + 1),
        (
            frames.ring, frames.table, frames.headers, frames.report, frames.orders, frames.heap, frames.records,
            frames.encoded, frames.heads, frames.references,
        ),
        (frames.records.shape[1], frames.ring_frames, n_records), (*_constants(frames), block_size(n_records)),
    )  # fmt: skip


def _constants(frames: DeviceFrames) -> tuple[int, ...]:
    return (frames.group, frames.frame_bytes, block_size(-(-frames.frame_bytes // 4)))


@triton.jit
def _write_base(
    kind, table, reference, heap, words_at, out_0, base_0, to_0, out_1, base_1, to_1,
    FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what the changes of a frame are applied to: the reference frame, zeros, or the frame if stored whole."""
    n_words: tl.constexpr = (FRAME_BYTES + 3) // 4
    source = table + reference * n_words
    for begin in range(0, n_words, BLOCK):
        word = begin + tl.arange(0, BLOCK)
        mask = word < n_words
        values = tl.load(source + word, mask=mask & every(kind != _ZERO, BLOCK), other=0)
        if kind == _WHOLE:
            values = load_integer(heap, words_at + 4 * word, mask, 4, tl.int32)
        store_words(out_0, base_0, word, values, mask & every(to_0, BLOCK), FRAME_BYTES)
        store_words(out_1, base_1, word, values, mask & every(to_1, BLOCK), FRAME_BYTES)


@triton.jit
def _apply_changes(
    heap, words_at, skips_at, count, out_0, base_0, to_0, out_1, base_1, to_1,
    FRAME_BYTES: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    n_words: tl.constexpr = (FRAME_BYTES + 3) // 4
    done = 0
    for begin in range(0, count, CHANGES):
        change = begin + tl.arange(0, CHANGES)
        mask = change < count
        skip = tl.load(heap + skips_at + change, mask=mask, other=0).to(tl.int32)
        step = tl.where(mask, skip + 1, 0)
        place = done + tl.cumsum(step, 0) - 1
        value = load_integer(heap, words_at + 4 * change, mask, 4, tl.int32)
        mask &= place < n_words
        store_words(out_0, base_0, place, value, mask & every(to_0, CHANGES), FRAME_BYTES)
        store_words(out_1, base_1, place, value, mask & every(to_1, CHANGES), FRAME_BYTES)
        done += tl.sum(step, 0)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _gather_delta(
    places, ends_0, ends_1, records, heap, table, ring, encoded, fields, out_0, out_1, actions, rewards, dones,
    second_at, envs_at, n_envs, capacity, ring_frames,
    STACK: tl.constexpr, PAIR: tl.constexpr, GROUP: tl.constexpr, FRAME_BYTES: tl.constexpr,
    BLOCK: tl.constexpr, ROW_WORDS: tl.constexpr, ACTION_WORDS: tl.constexpr, ACTION_BLOCK: tl.constexpr,
    ACTIONS_AT: tl.constexpr, REWARDS_AT: tl.constexpr, DONES_AT: tl.constexpr, TIMEOUTS_AT: tl.constexpr,
    CHANGES: tl.constexpr,
):  # fmt: skip
    left, start, packed, position, base_0, to_0, base_1, to_1 = begin_frame(
        places, ends_0, ends_1, records, heap, ring, encoded, fields, out_0, out_1, actions, rewards, dones,
        second_at, envs_at, n_envs, capacity, ring_frames, STACK, PAIR, GROUP, FRAME_BYTES, BLOCK,
        ROW_WORDS, ACTION_WORDS, ACTION_BLOCK, ACTIONS_AT, REWARDS_AT, DONES_AT, TIMEOUTS_AT,
    )  # fmt: skip
    if left == 0:
        return
    reference = packed >> _LENGTH_BITS
    n_words: tl.constexpr = (FRAME_BYTES + 3) // 4
    words_at = start + 4 * GROUP
    skips_at = words_at
    for link in tl.static_range(GROUP):
        header = load_header(heap + start + 4 * link)
        whole = ((header >> _KIND_SHIFT) & 3) == _WHOLE
        skips_at += 4 * tl.where(whole, n_words, header & _COUNT_MASK)
    for link in range(position + 1):
        header = load_header(heap + start + 4 * link)
        kind = (header >> _KIND_SHIFT) & 3
        count = tl.where(kind == _WHOLE, 0, header & _COUNT_MASK)
        if (link == 0) | (kind != _PREVIOUS):
            _write_base(
                kind, table, reference, heap, words_at, out_0, base_0, to_0, out_1, base_1, to_1, FRAME_BYTES, BLOCK
            )  # fmt: skip
        # Changes overwrite words that other threads of this program have just written.
        tl.debug_barrier()
        _apply_changes(
            heap, words_at, skips_at, count, out_0, base_0, to_0, out_1, base_1, to_1, FRAME_BYTES, CHANGES
        )  # fmt: skip
        tl.debug_barrier()
        words_at += 4 * tl.where(kind == _WHOLE, n_words, count)
        skips_at += count


_SMALL = 2048
"""Up to this size in words, one warp decodes a frame. A batch has enough frames to keep the GPU busy."""
_launch_small, _launch_large = Launcher(_gather_delta, n_warps=1), Launcher(_gather_delta, n_warps=2)


def gather_delta(frames: DeviceFrames, batch: ObservationBatch) -> RepeatedLaunch:
    """Return the launch that rebuilds ``batch``, and others of its size from the same tensors."""
    n_words = -(-frames.frame_bytes // 4)
    if n_words <= _SMALL:
        return gather_launch(_launch_small, frames, batch, block_size(n_words, 1024), (64,))
    return gather_launch(_launch_large, frames, batch, block_size(n_words), (256,))
