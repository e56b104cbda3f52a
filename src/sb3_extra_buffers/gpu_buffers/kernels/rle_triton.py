"""Observations rebuilt from ``rle`` records, a batch in one launch.

A program rebuilds one frame of one sample, as in :mod:`.delta_triton`. It marks in the output where runs begin; the
number of marks up to an element is then the number of its run, whose value takes the mark's place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sb3_extra_buffers.gpu_buffers.kernels.batch import ObservationBatch, field_arguments, field_constants, field_type
from sb3_extra_buffers.gpu_buffers.kernels.device_functions import (
    copy_bytes,
    copy_fields,
    every,
    fill_zero,
    first_frame,
)
from sb3_extra_buffers.gpu_buffers.kernels.frames import DeviceFrames
from sb3_extra_buffers.gpu_buffers.kernels.launching import Launcher, block_size

_ELEMENTS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _load_integer(source, at, mask, BYTES: tl.constexpr, TYPE: tl.constexpr):
    """An integer of some bytes, which need not be aligned."""
    value = tl.load(source + at, mask=mask, other=0).to(TYPE)
    for i in tl.static_range(1, BYTES):
        value |= tl.load(source + at + i, mask=mask, other=0).to(TYPE) << (8 * i)
    return value


@triton.jit(do_not_specialize=["n", "n_envs", "capacity", "ring_frames"])
def _gather_rle(
    places,
    ends_0,
    ends_1,
    records,
    heap,
    ring,
    encoded,
    out_0,
    out_1,
    fields,
    actions,
    rewards,
    dones,
    n,
    n_envs,
    capacity,
    ring_frames,
    STACK: tl.constexpr,
    PAIR: tl.constexpr,
    WAITING: tl.constexpr,
    FRAME_BYTES: tl.constexpr,
    RUN_BYTES: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ACTION_WORDS: tl.constexpr,
    ACTION_BLOCK: tl.constexpr,
    ACTIONS_AT: tl.constexpr,
    REWARDS_AT: tl.constexpr,
    DONES_AT: tl.constexpr,
    TIMEOUTS_AT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    slot = tl.load(places + row)
    lane = tl.load(places + (1 + PAIR) * n + row)
    first_0 = first_frame(ends_0, slot, n_envs, lane, STACK)
    first_1 = first_0
    if PAIR:
        first_1 = first_frame(ends_1, tl.load(places + n + row), n_envs, lane, STACK)
    number = first_0 + place
    if place >= STACK:
        number = first_1 + place - STACK
    at_0, at_1 = number - first_0, number - first_1
    to_0 = (at_0 >= 0) & (at_0 < STACK)
    to_1 = (at_1 >= 0) & (at_1 < STACK * PAIR)
    if (place >= STACK) & to_0:
        return
    if ACTION_WORDS > 0:
        if place == 0:
            copy_fields(
                fields, slot, lane, row, actions, rewards, dones,
                ROW_WORDS, ACTION_WORDS, ACTION_BLOCK, ACTIONS_AT, REWARDS_AT, DONES_AT, TIMEOUTS_AT,
            )  # fmt: skip
    base_0, base_1 = (row * STACK + at_0) * FRAME_BYTES, (row * STACK + at_1) * FRAME_BYTES
    if number < 0:
        fill_zero(out_0, base_0, to_0, out_1, base_1, to_1, FRAME_BYTES, BLOCK)
        return
    if WAITING:
        if number >= tl.load(encoded + lane):
            waiting = (lane * ring_frames + number % ring_frames) * FRAME_BYTES
            copy_bytes(ring, waiting, out_0, base_0, to_0, out_1, base_1, to_1, FRAME_BYTES, BLOCK)
            return
    entry = records + 2 * (lane * capacity + number % capacity)
    start = tl.load(entry)
    length = tl.load(entry + 1) & 0xFFFFFFFF
    if length == FRAME_BYTES:
        copy_bytes(heap, start, out_0, base_0, to_0, out_1, base_1, to_1, FRAME_BYTES, BLOCK)
        return
    n_elements: tl.constexpr = FRAME_BYTES // ELEMENT_BYTES
    target_0 = (out_0 + base_0).to(tl.pointer_type(ELEMENT))
    target_1 = (out_1 + base_1).to(tl.pointer_type(ELEMENT))
    marks = target_0
    if to_0 == 0:
        marks = target_1
    for begin in range(0, n_elements, BLOCK):
        element = begin + tl.arange(0, BLOCK)
        tl.store(marks + element, tl.zeros((BLOCK,), dtype=ELEMENT), mask=element < n_elements)
    tl.debug_barrier()
    count = (length // (RUN_BYTES + ELEMENT_BYTES)).to(tl.int32)
    done = 0
    for begin in range(0, count, BLOCK):
        run = begin + tl.arange(0, BLOCK)
        size = _load_integer(heap, start + run * RUN_BYTES, run < count, RUN_BYTES, tl.int64).to(tl.int32)
        first = done + tl.cumsum(size, 0) - size
        tl.store(marks + first, tl.full((BLOCK,), 1, dtype=ELEMENT), mask=(run < count) & (first < n_elements))
        done += tl.sum(size, 0)
    tl.debug_barrier()
    values_at = start + count * RUN_BYTES
    seen = -1
    for begin in range(0, n_elements, BLOCK):
        element = begin + tl.arange(0, BLOCK)
        mask = element < n_elements
        mark = (tl.load(marks + element, mask=mask, other=0) != 0).to(tl.int32)
        run = seen + tl.cumsum(mark, 0)
        value = _load_integer(heap, values_at + run * ELEMENT_BYTES, mask, ELEMENT_BYTES, ELEMENT)
        seen += tl.sum(mark, 0)
        tl.debug_barrier()
        tl.store(target_0 + element, value, mask=mask & every(to_0, BLOCK))
        tl.store(target_1 + element, value, mask=mask & every(to_1, BLOCK))


_launch = Launcher(_gather_rle, n_warps=4)


def gather_rle(frames: DeviceFrames, batch: ObservationBatch, run_bytes: int, element_bytes: int) -> None:
    """Fill the outputs of ``batch`` with observations, and with the fields that belong to them."""
    places, ends, outs, fields = batch
    n = places.shape[1]
    constants = (
        frames.stack, int(len(outs) > 1), frames.any_waiting, frames.frame_bytes, run_bytes, element_bytes,
        _ELEMENTS[element_bytes], block_size(frames.frame_bytes, 1024), *field_constants(fields),
    )  # fmt: skip
    _launch(
        outs[0].device, (n, frames.stack * len(outs)), (constants, field_type(fields)),
        places, ends[0], ends[-1], frames.records, frames.heap, frames.ring, frames.encoded, outs[0], outs[-1],
        *field_arguments(fields, outs[0]),
        n, ends[0].shape[1], frames.records.shape[1], frames.ring.shape[1], *constants,
    )  # fmt: skip
