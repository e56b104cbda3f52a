"""Encodes frames in the ring as ``rle`` records, and rebuilds batches from records. See :mod:`.delta` for the launches.

To rebuild a frame, a program first marks in the output where each run begins. The sum of the marks up to an element is
the number of its run. Then the values of the runs overwrite the marks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sb3_extra_buffers.gpu_buffers.kernels import (
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
    load_integer,
    store_integer,
)

_HEADER = tl.constexpr(REPORT_HEADER)
_ELEMENTS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _begins(elements, at, mask):
    """Whether an element differs from the one before it."""
    inside = mask & (at > 0)
    here = tl.load(elements + at, mask=inside, other=0)
    return mask & ((at == 0) | (here != tl.load(elements + at - 1, mask=inside, other=0)))


@triton.jit(do_not_specialize=["ring_frames", "n_records"])
def _measure(
    ring, heads, encoded, report, ring_frames, n_records,
    FRAME_BYTES: tl.constexpr, RUN_BYTES: tl.constexpr, ELEMENT_BYTES: tl.constexpr, ELEMENT: tl.constexpr,
    LONGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n_elements: tl.constexpr = FRAME_BYTES // ELEMENT_BYTES
    lane = tl.program_id(0).to(tl.int64)
    record = tl.program_id(1)
    head = tl.load(heads + lane)
    first = tl.load(encoded + lane)
    row = report + lane * (_HEADER + n_records)
    if record == 0:
        begin_report(row, head, head * 0, first, head * 0)
    number = first + record
    if number < head:
        position = lane * ring_frames + number % ring_frames
        elements = (ring + position * FRAME_BYTES).to(tl.pointer_type(ELEMENT))
        count = 0
        last = 0
        for begin in range(0, n_elements, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            begins = _begins(elements, at, at < n_elements)
            before = last_mark(at, _begins(elements, at - 1, (at > 0) & (at <= n_elements)), last)
            count += tl.sum(tl.where(begins & (at > 0), 1 + (at - before - 1) // LONGEST, 0), 0)
            last = tl.maximum(last, tl.max(tl.where(begins, at, 0), 0))
        count += 1 + (n_elements - last - 1) // LONGEST
        length = tl.minimum(count * (RUN_BYTES + ELEMENT_BYTES), FRAME_BYTES)
        tl.store(row + _HEADER + record, length.to(tl.int64))


@triton.jit(do_not_specialize=["capacity", "ring_frames", "n_records"])
def _write(
    ring, report, orders, heap, records, encoded, capacity, ring_frames, n_records,
    FRAME_BYTES: tl.constexpr, RUN_BYTES: tl.constexpr, ELEMENT_BYTES: tl.constexpr, ELEMENT: tl.constexpr,
    LONGEST: tl.constexpr, BLOCK: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    n_elements: tl.constexpr = FRAME_BYTES // ELEMENT_BYTES
    lane = tl.program_id(0).to(tl.int64)
    number, start, packed = find_record(
        report, orders, lane, tl.program_id(1), records, encoded, capacity, n_records, 1, RECORDS
    )  # fmt: skip
    if packed == 0:
        return
    length = packed.to(tl.int32)
    frame = (lane * ring_frames + number % ring_frames) * FRAME_BYTES
    if length == FRAME_BYTES:
        copy_frame(ring, frame, heap, start, FRAME_BYTES, BLOCK)
        return
    elements = (ring + frame).to(tl.pointer_type(ELEMENT))
    count = length // (RUN_BYTES + ELEMENT_BYTES)
    values_at = start + count * RUN_BYTES
    done = 0
    last = 0
    for begin in range(0, n_elements, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mask = at < n_elements
        changed = _begins(elements, at, mask)
        before = last_mark(at, _begins(elements, at - 1, (at > 0) & (at <= n_elements)), last)
        begins = changed | (mask & ((at - before) % LONGEST == 0))
        rank = done + tl.cumsum(begins.to(tl.int32), 0) - 1
        value = tl.load(elements + at, mask=mask, other=0)
        store_integer(heap, values_at + rank * ELEMENT_BYTES, value, begins, ELEMENT_BYTES)
        # The length of a run is known when the next one begins.
        size = (at - before - 1) % LONGEST + 1
        store_integer(heap, start + (rank - 1) * RUN_BYTES, size.to(tl.int64), begins & (rank > 0), RUN_BYTES)
        done += tl.sum(begins.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(changed, at, 0), 0))
    size = ((n_elements - last - 1) % LONGEST + 1).to(tl.int64)
    for i in tl.static_range(RUN_BYTES):
        tl.store(heap + start + (count - 1) * RUN_BYTES + i, ((size >> (8 * i)) & 0xFF).to(tl.uint8))


_launch_measure = Launcher(_measure, n_warps=4)
_launch_write = Launcher(_write, n_warps=4)


def measure_rle(frames: DeviceFrames, run_bytes: int, element_bytes: int, longest_run: int) -> None:
    """Measure the next records of each lane. Fills :attr:`DeviceFrames.report`."""
    n_lanes, n_records = frames.report.shape[0], frames.n_records
    _launch_measure(
        frames.ring.device, (n_lanes, n_records), (frames.ring, frames.heads, frames.encoded, frames.report),
        (frames.ring_frames, n_records), _constants(frames, run_bytes, element_bytes, longest_run),
    )  # fmt: skip


def write_rle(frames: DeviceFrames, run_bytes: int, element_bytes: int, longest_run: int) -> None:
    """Write measured records, and enter them into the index, as :attr:`DeviceFrames.orders` says."""
    n_lanes, n_records = frames.report.shape[0], frames.n_records
    constants = _constants(frames, run_bytes, element_bytes, longest_run)
    _launch_write(
        frames.ring.device, (n_lanes, n_records),
        (frames.ring, frames.report, frames.orders, frames.heap, frames.records, frames.encoded),
        (frames.records.shape[1], frames.ring_frames, n_records), (*constants, block_size(n_records)),
    )  # fmt: skip


def _constants(frames: DeviceFrames, run_bytes: int, element_bytes: int, longest_run: int) -> tuple[object, ...]:
    block = block_size(frames.frame_bytes // element_bytes)
    return (frames.frame_bytes, run_bytes, element_bytes, _ELEMENTS[element_bytes], longest_run, block)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _gather_rle(
    places, ends_0, ends_1, records, heap, table, ring, encoded, fields, out_0, out_1, actions, rewards, dones,
    second_at, envs_at, n_envs, capacity, ring_frames,
    STACK: tl.constexpr, PAIR: tl.constexpr, GROUP: tl.constexpr, FRAME_BYTES: tl.constexpr,
    BLOCK: tl.constexpr, ROW_WORDS: tl.constexpr, ACTION_WORDS: tl.constexpr, ACTION_BLOCK: tl.constexpr,
    ACTIONS_AT: tl.constexpr, REWARDS_AT: tl.constexpr, DONES_AT: tl.constexpr, TIMEOUTS_AT: tl.constexpr,
    RUN_BYTES: tl.constexpr, ELEMENT_BYTES: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    left, start, packed, _, base_0, to_0, base_1, to_1 = begin_frame(
        places, ends_0, ends_1, records, heap, ring, encoded, fields, out_0, out_1, actions, rewards, dones,
        second_at, envs_at, n_envs, capacity, ring_frames, STACK, PAIR, GROUP, FRAME_BYTES, BLOCK,
        ROW_WORDS, ACTION_WORDS, ACTION_BLOCK, ACTIONS_AT, REWARDS_AT, DONES_AT, TIMEOUTS_AT,
    )  # fmt: skip
    if left == 0:
        return
    length = packed & 0xFFFFFFFF
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
        size = load_integer(heap, start + run * RUN_BYTES, run < count, RUN_BYTES, tl.int64).to(tl.int32)
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
        value = load_integer(heap, values_at + run * ELEMENT_BYTES, mask, ELEMENT_BYTES, ELEMENT)
        seen += tl.sum(mark, 0)
        tl.debug_barrier()
        tl.store(target_0 + element, value, mask=mask & every(to_0, BLOCK))
        tl.store(target_1 + element, value, mask=mask & every(to_1, BLOCK))


_launch_gather = Launcher(_gather_rle, n_warps=4)


def gather_rle(frames: DeviceFrames, batch: ObservationBatch, run_bytes: int, element_bytes: int) -> RepeatedLaunch:
    """Return the launch that rebuilds ``batch``, and others of its size from the same tensors."""
    own_constants = (run_bytes, element_bytes, _ELEMENTS[element_bytes])
    return gather_launch(_launch_gather, frames, batch, block_size(frames.frame_bytes, 1024), own_constants)
