"""``delta`` records made of waiting frames. What the steps do: :mod:`.delta_encode_torch`."""

from __future__ import annotations

import torch as th
import triton
import triton.language as tl

from sb3_extra_buffers.codecs import delta as delta_format
from sb3_extra_buffers.gpu_buffers.kernels.delta_encode_torch import REACH
from sb3_extra_buffers.gpu_buffers.kernels.device_functions import (
    copy_frame,
    every,
    last_mark,
    load_frame_words,
    store_integer,
)
from sb3_extra_buffers.gpu_buffers.kernels.frames import LENGTH_BITS
from sb3_extra_buffers.gpu_buffers.kernels.lanes import Jobs, Lanes
from sb3_extra_buffers.gpu_buffers.kernels.launching import Launcher, block_size

_KIND_SHIFT = tl.constexpr(delta_format.KIND_SHIFT)
_COUNT_MASK = tl.constexpr(delta_format.COUNT_MASK)
_PREVIOUS = tl.constexpr(delta_format.PREVIOUS)
_REFERENCE = tl.constexpr(delta_format.REFERENCE)
_ZERO = tl.constexpr(delta_format.ZERO)
_WHOLE = tl.constexpr(delta_format.WHOLE)
_REACH = tl.constexpr(REACH)
_LENGTH_BITS = tl.constexpr(LENGTH_BITS)


@triton.jit
def _changed(
    ring, frame, before, base, kind, link, words, mask, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Whether words of the frame at byte ``frame`` of the ring differ from what ``kind`` says.

    That is the frame at byte ``before`` (for the first link, the reference), the reference at ``base``, or zeros.
    """
    follows = (kind == _PREVIOUS) & (link > 0)
    refers = (kind == _REFERENCE) | ((kind == _PREVIOUS) & (link == 0))
    expected = tl.load(base + words, mask=mask & every(refers, BLOCK), other=0)
    expected |= load_frame_words(ring, before, words, mask & every(follows, BLOCK), FRAME_BYTES)
    return mask & (load_frame_words(ring, frame, words, mask, FRAME_BYTES) != expected)


@triton.jit
def _count(ring, frame, before, base, kind, link, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """How many words are written for the changes of a frame, and the last that changed."""
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


@triton.jit(do_not_specialize=["ring_frames", "n_records"])
def _measure(
    ring, table, heads, encoded, references, headers, lengths, ring_frames, n_records,
    GROUP: tl.constexpr, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n_words: tl.constexpr = (FRAME_BYTES + 3) // 4
    lane = tl.program_id(0).to(tl.int64)
    record = tl.program_id(1)
    number = tl.load(encoded + lane) + record * GROUP
    length = 0
    if number + GROUP <= tl.load(heads + lane):
        base = table + tl.load(references + lane) * n_words
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
        length = tl.minimum(length, GROUP * FRAME_BYTES)
    tl.store(lengths + lane * n_records + record, length)


@triton.jit
def _write_changes(
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


@triton.jit(do_not_specialize=["ring_frames", "n"])
def _write(
    ring, table, headers, jobs, heap, ring_frames, n,
    GROUP: tl.constexpr, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n_words: tl.constexpr = (FRAME_BYTES + 3) // 4
    job = tl.program_id(0)
    lane = tl.load(jobs + job)
    number = tl.load(jobs + n + job)
    start = tl.load(jobs + 2 * n + job)
    packed = tl.load(jobs + 3 * n + job)
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
            _write_changes(ring, frame, before, base, kind, link, heap, words_at, skips_at, FRAME_BYTES, BLOCK)
            words_at += 4 * count
            skips_at += count
        before = frame


_launch_measure = Launcher(_measure, n_warps=4)
_launch_write = Launcher(_write, n_warps=4)


def measure_delta(
    lanes: Lanes, encoded: th.Tensor, table: th.Tensor, references: th.Tensor, headers: th.Tensor, group: int
) -> th.Tensor:
    """See :func:`.delta_encode_torch.measure_delta`."""
    n_lanes, n_frames, frame_bytes = lanes.ring.shape
    n_records = n_frames // group
    lengths = th.empty((n_lanes, n_records), dtype=th.int64, device=encoded.device)
    constants = (group, frame_bytes, block_size(-(-frame_bytes // 4)))
    _launch_measure(
        encoded.device, (n_lanes, n_records), constants,
        lanes.ring, table, lanes.heads, encoded, references, headers, lengths, n_frames, n_records, *constants,
    )  # fmt: skip
    return lengths


def write_delta(lanes: Lanes, table: th.Tensor, headers: th.Tensor, jobs: Jobs, heap: th.Tensor, group: int) -> None:
    """See :func:`.delta_encode_torch.write_delta`."""
    _, n_frames, frame_bytes = lanes.ring.shape
    n = jobs.table.shape[1]
    constants = (group, frame_bytes, block_size(-(-frame_bytes // 4)))
    _launch_write(
        heap.device, (n, 1), constants, lanes.ring, table, headers, jobs.table, heap, n_frames, n, *constants
    )  # fmt: skip
