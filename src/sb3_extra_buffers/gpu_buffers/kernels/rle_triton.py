"""Observations rebuilt from ``rle`` records, a batch in one launch; see :mod:`.gather_triton`.

A program marks in the output where runs begin. The number of marks up to an element is then the number of its run,
whose value takes the mark's place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sb3_extra_buffers.gpu_buffers.kernels.batch import ObservationBatch
from sb3_extra_buffers.gpu_buffers.kernels.device_functions import every
from sb3_extra_buffers.gpu_buffers.kernels.frames import DeviceFrames
from sb3_extra_buffers.gpu_buffers.kernels.gather_triton import NOT_SPECIALIZED, begin_frame, launch_gather
from sb3_extra_buffers.gpu_buffers.kernels.launching import Launcher, block_size

ELEMENTS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _load_integer(source, at, mask, BYTES: tl.constexpr, TYPE: tl.constexpr):
    """An integer of some bytes, which need not be aligned."""
    value = tl.load(source + at, mask=mask, other=0).to(TYPE)
    for i in tl.static_range(1, BYTES):
        value |= tl.load(source + at + i, mask=mask, other=0).to(TYPE) << (8 * i)
    return value


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _gather_rle(
    places, ends_0, ends_1, records, heap, table, ring, encoded, out_0, out_1, fields, actions, rewards, dones,
    n, n_envs, capacity, ring_frames,
    STACK: tl.constexpr, PAIR: tl.constexpr, WAITING: tl.constexpr, GROUP: tl.constexpr, FRAME_BYTES: tl.constexpr,
    BLOCK: tl.constexpr, ROW_WORDS: tl.constexpr, ACTION_WORDS: tl.constexpr, ACTION_BLOCK: tl.constexpr,
    ACTIONS_AT: tl.constexpr, REWARDS_AT: tl.constexpr, DONES_AT: tl.constexpr, TIMEOUTS_AT: tl.constexpr,
    RUN_BYTES: tl.constexpr, ELEMENT_BYTES: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    left, start, packed, _, base_0, to_0, base_1, to_1 = begin_frame(
        places, ends_0, ends_1, records, heap, ring, encoded, out_0, out_1, fields, actions, rewards, dones,
        n, n_envs, capacity, ring_frames, STACK, PAIR, WAITING, GROUP, FRAME_BYTES, BLOCK,
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
    own_constants = (run_bytes, element_bytes, ELEMENTS[element_bytes])
    launch_gather(_launch, frames, batch, block_size(frames.frame_bytes, 1024), own_constants)
