"""Appends the observations of a step to the lanes of their environments, in one launch.

Each program handles one environment, and does what :func:`sb3_extra_buffers.storage.matching.append_new_frames` does on
the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch as th
import triton
import triton.language as tl

from sb3_extra_buffers.gpu_buffers.kernels import DeviceFrames, FieldRow, Launcher, block_size
from sb3_extra_buffers.gpu_buffers.transfer import COUNT_MASK, Observations
from sb3_extra_buffers.storage.stacking import MemoryForm


@triton.jit
def _load_frame(
    observation, frame, at, mask,
    STACK: tl.constexpr, PIXELS: tl.constexpr, CHUNK: tl.constexpr, ITEM: tl.constexpr,
):  # fmt: skip
    """Load the elements ``at`` of a frame from an observation. ``MemoryForm`` describes its order in memory."""
    if PIXELS == 1:
        where = frame * CHUNK + at
    else:
        plane, rest = at // (PIXELS * ITEM), at % (PIXELS * ITEM)
        where = rest // ITEM * (STACK * CHUNK) + frame * CHUNK + plane * ITEM + rest % ITEM
    return tl.load(observation + where, mask=mask, other=0)


@triton.jit
def _continues(
    observation, ring, head, new, ring_frames,
    STACK: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr, CHUNK: tl.constexpr, ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether the frames of an observation before its last ``new`` ones equal the newest frames of the lane."""
    different = 0
    frame = 0
    while (frame < STACK - new) & (different == 0):
        before = (head - STACK + new + frame) % ring_frames * SIZE
        for begin in range(0, SIZE, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            mine = _load_frame(observation, frame, at, at < SIZE, STACK, PIXELS, CHUNK, ITEM)
            differs = mine != tl.load(ring + before + at, mask=at < SIZE, other=0)
            different += tl.sum(differs.to(tl.int32), 0)
        frame += 1
    return different == 0


@triton.jit
def _take(
    observation, ring, head, is_known, ring_frames,
    STACK: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr, CHUNK: tl.constexpr, ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Append the new frames of an observation, and return the number of the frame after its last one."""
    found = (is_known == 0).to(tl.int32)
    new = found * STACK
    while (found == 0) & (new < STACK):
        same = _continues(observation, ring, head, new, ring_frames, STACK, SIZE, PIXELS, CHUNK, ITEM, BLOCK)
        found = same.to(tl.int32)
        new += 1 - found
    for frame in range(STACK - new, STACK):
        target = (head + frame - STACK + new) % ring_frames * SIZE
        for begin in range(0, SIZE, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            values = _load_frame(observation, frame, at, at < SIZE, STACK, PIXELS, CHUNK, ITEM)
            tl.store(ring + target + at, values, mask=at < SIZE)
    # The next observation is compared with frames that other threads of this program have just written.
    tl.debug_barrier()
    return head + new


@triton.jit(do_not_specialize=["slot_0", "slot_1", "n_lanes", "ring_frames", "count", "fields_slot", "continues"])
def _append(
    observations_0, observations_1, lanes, ring, heads, known, ends_0, ends_1, progress,
    fields_row, fields, slot_0, slot_1, n_lanes, ring_frames, count, fields_slot, continues,
    FIELD_WORDS: tl.constexpr, FIELD_BLOCK: tl.constexpr, PAIR: tl.constexpr, ELEMENT: tl.constexpr,
    STACK: tl.constexpr, SIZE: tl.constexpr,
    PIXELS: tl.constexpr, CHUNK: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if FIELD_WORDS > 0:
        if row == tl.num_programs(0) - 1:
            word = tl.arange(0, FIELD_BLOCK)
            values = tl.load(fields_row + word, mask=word < FIELD_WORDS)
            tl.store(fields + fields_slot.to(tl.int64) * FIELD_WORDS + word, values, mask=word < FIELD_WORDS)
            return
    lane = tl.load(lanes + row)
    own_ring = ring.to(tl.pointer_type(ELEMENT)) + lane * ring_frames * SIZE
    head = tl.load(heads + lane)
    is_known = tl.load(known + lane)
    if continues == 0:
        observation = observations_0.to(tl.pointer_type(ELEMENT)) + row * STACK * SIZE
        head = _take(observation, own_ring, head, is_known, ring_frames, STACK, SIZE, PIXELS, CHUNK, ITEM, BLOCK)
    tl.store(ends_0 + slot_0 * n_lanes + lane, head.to(tl.int32))
    if PAIR:
        is_known = is_known * 0 + 1
        observation = observations_1.to(tl.pointer_type(ELEMENT)) + row * STACK * SIZE
        head = _take(observation, own_ring, head, is_known, ring_frames, STACK, SIZE, PIXELS, CHUNK, ITEM, BLOCK)
        tl.store(ends_1 + slot_1 * n_lanes + lane, head.to(tl.int32))
    tl.store(heads + lane, head)
    tl.store(known + lane, 1)
    tl.store(progress + lane, count.to(tl.int64) << 32 | head)


_launch = Launcher(_append, n_warps=8)


def append_observations(
    frames: DeviceFrames,
    lanes: th.Tensor,
    observations: Observations,
    ends: list[th.Tensor],
    slots: Sequence[int],
    progress: th.Tensor,
    count: int,
    fields: FieldRow | None = None,
) -> None:
    """Append one or two observations to each of ``lanes``.

    :param lanes: ``int64``, (n,): the numbers of the lanes.
    :param observations: One or two observations for each of ``lanes``.
    :param ends: For each of the one or two, ``int32`` (slots, lanes): gets the number of the frame after its last one.
    :param slots: For each of the one or two, the row of its ``ends`` to write.
    :param progress: ``int64``, (lanes,), in host memory: gets the new head of each lane in the lower 32 bits, and
        ``count`` above them.
    :param count: How many observations per lane the device was told to append so far, including these.
    :param fields: The fields of the step, if this launch is to write them.
    """
    parts, form, continues = observations
    n_words = 0 if fields is None else fields.fields.shape[1]
    field_row, field_table, field_slot = (frames.headers, frames.headers, 0) if fields is None else fields
    n_lanes, ring_frames, frame_bytes = frames.ring.shape
    _launch(
        frames.ring.device, (lanes.shape[0] + (n_words > 0), 1),
        (
            parts[0], parts[-1], lanes, frames.ring, frames.heads, frames.known, ends[0], ends[-1], progress,
            field_row, field_table,
        ),
        (slots[0], slots[-1], n_lanes, ring_frames, count & COUNT_MASK, field_slot, int(continues)),
        _append_constants(n_words, len(ends) > 1, frames.stack, frame_bytes, form),
    )  # fmt: skip


@functools.cache
def _append_constants(n_words: int, pair: bool, stack: int, size: int, form: MemoryForm) -> tuple[Any, ...]:
    sizes, element = (size, *form), tl.uint8
    if form.pixels == 1 and size % 4 == 0:
        sizes, element = (size // 4, 1, size // 4, size // 4), tl.int32
    field_block = 1 << (n_words - 1).bit_length() if n_words else 1
    return (n_words, field_block, pair, element, stack, *sizes, block_size(sizes[0], 8192))


@triton.jit(do_not_specialize=["n_slots", "n_lanes", "width"])
def _find_oldest(ends_0, ends_1, report, n_slots, n_lanes, width, PAIR: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Minus one, so that 0, which means "no observation", becomes the largest number.
    end = (tl.load(ends_0 + slot * n_lanes + lane, mask=slot < n_slots, other=0) - 1).to(tl.int64) & 0xFFFFFFFF
    if PAIR:
        other = tl.load(ends_1 + slot * n_lanes + lane, mask=slot < n_slots, other=0) - 1
        end = tl.minimum(end, other.to(tl.int64) & 0xFFFFFFFF)
    tl.atomic_min(report + lane * width + 2, tl.min(end, 0) + 1)


_launch_oldest = Launcher(_find_oldest, n_warps=4)


def find_oldest(frames: DeviceFrames, ends: list[th.Tensor]) -> None:
    """Enter where the oldest observation of each lane ends into the report. Measuring resets it, so it comes first."""
    n_slots, n_lanes = ends[0].shape
    _launch_oldest(
        frames.report.device, (n_lanes, -(-n_slots // 1024)), (ends[0], ends[-1], frames.report),
        (n_slots, n_lanes, frames.report.shape[1]), (len(ends) > 1, 1024),
    )  # fmt: skip
