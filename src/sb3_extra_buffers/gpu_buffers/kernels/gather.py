"""What the kernels share: small functions, and the search for the frames of a batch.

Each program handles one frame of one sample. An observation and its next observation share most frames, so the program
of a frame writes it to all places where it is needed. Programs for frames of the next observation that the observation
has as well have nothing to do. :func:`begin_frame` implements this.

:func:`gather_rows` and :func:`gather_fields` gather data that is not compressed.
"""

from __future__ import annotations

from typing import Any

import torch as th
import triton
import triton.language as tl

from sb3_extra_buffers.gpu_buffers.kernels import (
    REPORT_HEADER,
    DeviceFrames,
    FieldBatch,
    Launcher,
    ObservationBatch,
    RepeatedLaunch,
    block_size,
    no_fields,
)
from sb3_extra_buffers.gpu_buffers.transfer import Places

NOT_SPECIALIZED = ["second_at", "envs_at", "n_envs", "capacity", "ring_frames"]
_HEADER = tl.constexpr(REPORT_HEADER)
_NEVER = tl.constexpr(1 << 32)
"""Where the oldest observation of a lane ends that has none: beyond all frame numbers."""


@triton.jit
def every(condition, SIZE: tl.constexpr):
    """Extend a scalar condition to all elements of a block."""
    # Not by broadcasting the condition: Triton's interpreter makes it an integer, which it refuses as a mask.
    return (tl.zeros((SIZE,), dtype=tl.int32) + condition.to(tl.int32)) != 0


@triton.jit
def load_integer(source, at, mask, BYTES: tl.constexpr, TYPE: tl.constexpr):
    """Load little-endian integers of ``BYTES`` bytes that begin at the bytes ``at`` of ``source``, aligned or not."""
    value = tl.load(source + at, mask=mask, other=0).to(TYPE)
    for i in tl.static_range(1, BYTES):
        value |= tl.load(source + at + i, mask=mask, other=0).to(TYPE) << (8 * i)
    return value


@triton.jit
def load_header(source):
    """Load a single integer of four bytes, aligned or not."""
    word = tl.load(source).to(tl.int32)
    for i in tl.static_range(1, 4):
        word |= tl.load(source + i).to(tl.int32) << (8 * i)
    return word


@triton.jit
def load_frame_words(source, base, words, mask, FRAME_BYTES: tl.constexpr):
    """Load the words ``words`` of the frame at byte ``base`` of ``source``. Zeros fill up the last word."""
    if FRAME_BYTES % 4 == 0:
        values = tl.load((source + base).to(tl.pointer_type(tl.int32)) + words, mask=mask, other=0)
    else:
        values = words * 0
        for i in tl.static_range(4):
            byte = 4 * words + i
            found = tl.load(source + base + byte, mask=mask & (byte < FRAME_BYTES), other=0)
            values |= found.to(tl.int32) << (8 * i)
    return values


@triton.jit
def store_integer(target, at, values, mask, BYTES: tl.constexpr):
    """Write little-endian integers of ``BYTES`` bytes to the bytes ``at`` of ``target``, aligned or not."""
    for i in tl.static_range(BYTES):
        tl.store(target + at + i, ((values >> (8 * i)) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def copy_frame(source, base, target, at, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    for begin in range(0, FRAME_BYTES, BLOCK):
        byte = begin + tl.arange(0, BLOCK)
        values = tl.load(source + base + byte, mask=byte < FRAME_BYTES, other=0)
        tl.store(target + at + byte, values, mask=byte < FRAME_BYTES)


@triton.jit
def begin_report(row, head, saved, first, reference):
    """Write the numbers before the record lengths to a lane's row of :attr:`DeviceFrames.report`."""
    tl.store(row, head)
    tl.store(row + 1, saved)
    tl.store(row + 2, _NEVER)
    tl.store(row + 3, first)
    tl.store(row + 4, reference)


@triton.jit
def find_record(
    report, orders, lane, record, records, encoded, capacity, n_records, GROUP: tl.constexpr, RECORDS: tl.constexpr
):  # fmt: skip
    """Enter this program's record into the index, if it is to be written.

    The records of a lane follow one another in the heap. Returns the record's first frame, its start in the heap, and
    its length and reference, or 0 if there is no record.
    """
    row = report + lane * (_HEADER + n_records)
    which = tl.arange(0, RECORDS)
    start = tl.load(orders + lane) + tl.sum(tl.load(row + _HEADER + which, mask=which < record, other=0), 0)
    n = tl.load(orders + tl.num_programs(0) + lane)
    number = tl.load(row + 3) + record * GROUP
    packed = number * 0
    if record < n:
        packed = tl.load(row + _HEADER + record) | tl.load(row + 4) << 32
        entry = records + 2 * (lane * capacity + number // GROUP % capacity)
        tl.store(entry, start)
        tl.store(entry + 1, packed)
        if record == n - 1:
            tl.store(encoded + lane, number + GROUP)
    return number, start, packed


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right)


@triton.jit
def last_mark(at, is_marked_before, earlier):
    """The position of the last mark before each of the elements ``at``.

    :param is_marked_before: Whether the element before each of them is marked.
    :param earlier: The position of the last mark before the block.
    """
    return tl.maximum(tl.associative_scan(tl.where(is_marked_before, at - 1, -1), 0, _larger), earlier)


@triton.jit
def store_words(out, base, words, values, mask, FRAME_BYTES: tl.constexpr):
    """Write ``values`` as the words ``words`` of the frame at byte ``base`` of ``out``."""
    if FRAME_BYTES % 4 == 0:
        target = (out + base).to(tl.pointer_type(tl.int32))
        tl.store(target + words, values, mask=mask)
    else:
        for i in tl.static_range(4):
            byte = 4 * words + i
            tl.store(out + base + byte, (values >> (8 * i)).to(tl.uint8), mask=mask & (byte < FRAME_BYTES))


@triton.jit
def copy_bytes(source, at, out_0, base_0, to_0, out_1, base_1, to_1, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the frame at byte ``at`` of ``source`` to the outputs that need it."""
    for begin in range(0, FRAME_BYTES, BLOCK):
        byte = begin + tl.arange(0, BLOCK)
        values = tl.load(source + at + byte, mask=byte < FRAME_BYTES, other=0)
        tl.store(out_0 + base_0 + byte, values, mask=(byte < FRAME_BYTES) & every(to_0, BLOCK))
        tl.store(out_1 + base_1 + byte, values, mask=(byte < FRAME_BYTES) & every(to_1, BLOCK))


@triton.jit
def fill_zero(out_0, base_0, to_0, out_1, base_1, to_1, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    for begin in range(0, FRAME_BYTES, BLOCK):
        byte = begin + tl.arange(0, BLOCK)
        zero = tl.zeros((BLOCK,), dtype=tl.uint8)
        tl.store(out_0 + base_0 + byte, zero, mask=(byte < FRAME_BYTES) & every(to_0, BLOCK))
        tl.store(out_1 + base_1 + byte, zero, mask=(byte < FRAME_BYTES) & every(to_1, BLOCK))


@triton.jit
def copy_fields(
    fields, slot, lane, row, actions, rewards, dones,
    ROW_WORDS: tl.constexpr, ACTION_WORDS: tl.constexpr, ACTION_BLOCK: tl.constexpr,
    ACTIONS_AT: tl.constexpr, REWARDS_AT: tl.constexpr, DONES_AT: tl.constexpr, TIMEOUTS_AT: tl.constexpr,
):  # fmt: skip
    """Gather the action, reward and done of one transition. Offsets are in words."""
    source = fields + slot * ROW_WORDS
    actions = actions.to(tl.pointer_type(tl.int32))
    word = tl.arange(0, ACTION_BLOCK)
    values = tl.load(source + ACTIONS_AT + lane * ACTION_WORDS + word, mask=word < ACTION_WORDS, other=0)
    tl.store(actions + row * ACTION_WORDS + word, values, mask=word < ACTION_WORDS)
    tl.store(rewards + row, tl.load(source + REWARDS_AT + lane).to(tl.float32, bitcast=True))
    done = tl.load(source + DONES_AT + lane).to(tl.float32, bitcast=True)
    timeout = tl.load(source + TIMEOUTS_AT + lane).to(tl.float32, bitcast=True)
    tl.store(dones + row, done * (1 - timeout))


@triton.jit
def first_frame(ends, slot, n_envs, lane, STACK: tl.constexpr):
    """The number of the first frame of an observation; negative if there is no observation."""
    end = tl.load(ends + slot * n_envs + lane).to(tl.int64) & 0xFFFFFFFF
    return end - STACK


@triton.jit
def begin_frame(
    places, ends_0, ends_1, records, heap, ring, encoded, fields, out_0, out_1, actions, rewards, dones,
    second_at, envs_at, n_envs, capacity, ring_frames,
    STACK: tl.constexpr, PAIR: tl.constexpr, GROUP: tl.constexpr, FRAME_BYTES: tl.constexpr,
    BLOCK: tl.constexpr, ROW_WORDS: tl.constexpr, ACTION_WORDS: tl.constexpr, ACTION_BLOCK: tl.constexpr,
    ACTIONS_AT: tl.constexpr, REWARDS_AT: tl.constexpr, DONES_AT: tl.constexpr, TIMEOUTS_AT: tl.constexpr,
):  # fmt: skip
    """Find this program's frame, and write it if it needs no decoding.

    Returns whether it is left to be decoded, its record's start, its record's length and reference, and its position in
    the record; and for each output, the byte at which it begins there, and whether it is needed there.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    slot = tl.load(places + row)
    lane = tl.load(places + envs_at + row)
    first_0 = first_frame(ends_0, slot, n_envs, lane, STACK)
    first_1 = first_0
    if PAIR:
        first_1 = first_frame(ends_1, tl.load(places + second_at + row), n_envs, lane, STACK)
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


def gather_launch(
    launcher: Launcher, frames: DeviceFrames, batch: ObservationBatch, block: int, own_constants: tuple[Any, ...]
) -> RepeatedLaunch:
    """Return the launch that fills the outputs of ``batch``, and of others of its size from the same tensors."""
    places, ends, outs, given = batch
    fields = given or no_fields(frames.table)
    inputs = (
        places.numbers, ends[0], ends[-1], frames.records, frames.heap, frames.table, frames.ring, frames.encoded,
        fields.fields,
    )  # fmt: skip
    numbers = (places.second_at, places.envs_at, ends[0].shape[1], frames.records.shape[1], frames.ring_frames)
    sizes = (frames.stack, len(outs) - 1, frames.group, frames.frame_bytes, block)
    constants = (*sizes, *fields.constants, *own_constants)
    return RepeatedLaunch(launcher, outs[0].device, (places.n, frames.stack * len(outs)), inputs, numbers, constants)


@triton.jit
def _copy_row(source, source_row, target, target_row, at, ELEMENT: tl.constexpr, SIZE: tl.constexpr):
    found = tl.load(source.to(tl.pointer_type(ELEMENT)) + source_row * SIZE + at, mask=at < SIZE)
    tl.store(target.to(tl.pointer_type(ELEMENT)) + target_row * SIZE + at, found, mask=at < SIZE)


@triton.jit(do_not_specialize=["second_at", "envs_at", "n_envs"])
def _gather_rows(
    places, values_0, values_1, out_0, out_1, fields, actions, rewards, dones, second_at, envs_at, n_envs,
    PAIR: tl.constexpr, ELEMENT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ROW_WORDS: tl.constexpr, ACTION_WORDS: tl.constexpr, ACTION_BLOCK: tl.constexpr,
    ACTIONS_AT: tl.constexpr, REWARDS_AT: tl.constexpr, DONES_AT: tl.constexpr, TIMEOUTS_AT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(places + row)
    lane = tl.load(places + envs_at + row)
    at = part * BLOCK + tl.arange(0, BLOCK)
    _copy_row(values_0, slot * n_envs + lane, out_0, row, at, ELEMENT, SIZE)
    if PAIR:
        slot_1 = tl.load(places + second_at + row)
        _copy_row(values_1, slot_1 * n_envs + lane, out_1, row, at, ELEMENT, SIZE)
    if ACTION_WORDS > 0:
        if part == 0:
            copy_fields(
                fields, slot, lane, row, actions, rewards, dones,
                ROW_WORDS, ACTION_WORDS, ACTION_BLOCK, ACTIONS_AT, REWARDS_AT, DONES_AT, TIMEOUTS_AT,
            )  # fmt: skip


_launch_rows = Launcher(_gather_rows, n_warps=4)


def gather_rows(places: Places, values: list[th.Tensor], outs: list[th.Tensor], fields: FieldBatch | None) -> None:
    """Copy the rows of ``values``, (slots, environments, bytes), at ``places`` to ``outs``, and gather ``fields``."""
    fields = fields or no_fields(outs[0])
    size = values[0].shape[2]
    words = size % 4 == 0
    if words:
        size //= 4
    block = block_size(size, 1024)
    _launch_rows(
        outs[0].device, (places.n, -(-size // block)),
        (places.numbers, values[0], values[-1], outs[0], outs[-1], *fields[:4]),
        (places.second_at, places.envs_at, values[0].shape[1]),
        (len(outs) > 1, tl.int32 if words else tl.uint8, size, block, *fields.constants),
    )  # fmt: skip


@triton.jit(do_not_specialize=["envs_at"])
def _gather_fields(
    places, fields, actions, rewards, dones, envs_at,
    ROW_WORDS: tl.constexpr, ACTION_WORDS: tl.constexpr, ACTION_BLOCK: tl.constexpr,
    ACTIONS_AT: tl.constexpr, REWARDS_AT: tl.constexpr, DONES_AT: tl.constexpr, TIMEOUTS_AT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    copy_fields(
        fields, tl.load(places + row), tl.load(places + envs_at + row), row, actions, rewards, dones,
        ROW_WORDS, ACTION_WORDS, ACTION_BLOCK, ACTIONS_AT, REWARDS_AT, DONES_AT, TIMEOUTS_AT,
    )  # fmt: skip


_launch_fields = Launcher(_gather_fields, n_warps=1)


def gather_fields(places: Places, batch: FieldBatch) -> None:
    """Fill ``batch`` with the fields at ``places``, in the slots of the first column."""
    _launch_fields(
        batch.rewards.device, (places.n, 1), (places.numbers, *batch[:4]), (places.envs_at,), batch.constants
    )  # fmt: skip
