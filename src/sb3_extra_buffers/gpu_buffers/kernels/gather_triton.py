"""What the kernels that rebuild observations have in common, whatever the records are.

A program rebuilds one frame of one sample and writes it wherever it is wanted: an observation and its successor have
most frames in common. Programs for frames of the successor that are in the observation as well have nothing to do.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from sb3_extra_buffers.gpu_buffers.kernels.batch import ObservationBatch, field_arguments, field_constants, field_type
from sb3_extra_buffers.gpu_buffers.kernels.device_functions import copy_bytes, copy_fields, fill_zero
from sb3_extra_buffers.gpu_buffers.kernels.frames import DeviceFrames
from sb3_extra_buffers.gpu_buffers.kernels.launching import Launcher

NOT_SPECIALIZED = ["n", "n_envs", "capacity", "ring_frames"]


@triton.jit
def first_frame(ends, slot, n_envs, lane, STACK: tl.constexpr):
    """The number of the first frame of an observation; negative where there is none."""
    end = tl.load(ends + slot * n_envs + lane).to(tl.int64) & 0xFFFFFFFF
    return end - STACK


@triton.jit
def begin_frame(
    places, ends_0, ends_1, records, heap, ring, encoded, out_0, out_1, fields, actions, rewards, dones,
    n, n_envs, capacity, ring_frames,
    STACK: tl.constexpr, PAIR: tl.constexpr, WAITING: tl.constexpr, GROUP: tl.constexpr, FRAME_BYTES: tl.constexpr,
    BLOCK: tl.constexpr, ROW_WORDS: tl.constexpr, ACTION_WORDS: tl.constexpr, ACTION_BLOCK: tl.constexpr,
    ACTIONS_AT: tl.constexpr, REWARDS_AT: tl.constexpr, DONES_AT: tl.constexpr, TIMEOUTS_AT: tl.constexpr,
):  # fmt: skip
    """Find this program's frame, and write it if that takes no decoding.

    Returns whether there is something left to do, the frame's index entry and position in the record, and where it is
    wanted: for each output, where it begins there, and whether it does.
    """
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
    base_0, base_1 = (row * STACK + at_0) * FRAME_BYTES, (row * STACK + at_1) * FRAME_BYTES
    start, packed = number * 0, number * 0
    left = ((place < STACK) | (to_0 == 0)).to(tl.int32)
    if left != 0:
        if ACTION_WORDS > 0:
            if place == 0:
                copy_fields(
                    fields, slot, lane, row, actions, rewards, dones,
                    ROW_WORDS, ACTION_WORDS, ACTION_BLOCK, ACTIONS_AT, REWARDS_AT, DONES_AT, TIMEOUTS_AT,
                )  # fmt: skip
        if number < 0:
            fill_zero(out_0, base_0, to_0, out_1, base_1, to_1, FRAME_BYTES, BLOCK)
            left = 0
        if WAITING:
            if (left != 0) & (number >= tl.load(encoded + lane)):
                waiting = (lane * ring_frames + number % ring_frames) * FRAME_BYTES
                copy_bytes(ring, waiting, out_0, base_0, to_0, out_1, base_1, to_1, FRAME_BYTES, BLOCK)
                left = 0
    if left != 0:
        entry = records + 2 * (lane * capacity + (number // GROUP) % capacity)
        start = tl.load(entry)
        packed = tl.load(entry + 1)
        if (packed & 0xFFFFFFFF) == GROUP * FRAME_BYTES:
            at = start + number % GROUP * FRAME_BYTES
            copy_bytes(heap, at, out_0, base_0, to_0, out_1, base_1, to_1, FRAME_BYTES, BLOCK)
            left = 0
    return left, start, packed, number % GROUP, base_0, to_0, base_1, to_1


def launch_gather(
    launcher: Launcher, frames: DeviceFrames, batch: ObservationBatch, block: int, own_constants: tuple[Any, ...]
) -> None:
    """Fill the outputs of ``batch`` with observations, and with the fields that belong to them."""
    places, ends, outs, fields = batch
    n, n_outs = places.shape[1], len(outs)
    constants = (
        frames.stack, n_outs - 1, frames.any_waiting, frames.group, frames.frame_bytes, block,
        *field_constants(fields), *own_constants,
    )  # fmt: skip
    launcher(
        outs[0].device, (n, frames.stack * n_outs), (constants, field_type(fields)),
        places, ends[0], ends[-1], frames.records, frames.heap, frames.table, frames.ring, frames.encoded,
        outs[0], outs[-1], *field_arguments(fields, outs[0]),
        n, ends[0].shape[1], frames.records.shape[1], frames.ring.shape[1], *constants,
    )  # fmt: skip
