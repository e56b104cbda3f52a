"""``rle`` records made of waiting frames. What the steps do: :mod:`.rle_encode_torch`."""

from __future__ import annotations

import torch as th
import triton
import triton.language as tl

from sb3_extra_buffers.gpu_buffers.kernels.device_functions import copy_frame, last_mark, store_integer
from sb3_extra_buffers.gpu_buffers.kernels.lanes import Jobs, Lanes
from sb3_extra_buffers.gpu_buffers.kernels.launching import Launcher, block_size
from sb3_extra_buffers.gpu_buffers.kernels.rle_encode_torch import RunFormat
from sb3_extra_buffers.gpu_buffers.kernels.rle_triton import ELEMENTS


@triton.jit
def _begins(elements, at, mask):
    """Whether an element differs from the one before it."""
    inside = mask & (at > 0)
    here = tl.load(elements + at, mask=inside, other=0)
    return mask & ((at == 0) | (here != tl.load(elements + at - 1, mask=inside, other=0)))


@triton.jit(do_not_specialize=["ring_frames"])
def _measure(
    ring, heads, encoded, lengths, ring_frames,
    FRAME_BYTES: tl.constexpr, RUN_BYTES: tl.constexpr, ELEMENT_BYTES: tl.constexpr, ELEMENT: tl.constexpr,
    LONGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n_elements: tl.constexpr = FRAME_BYTES // ELEMENT_BYTES
    lane = tl.program_id(0).to(tl.int64)
    record = tl.program_id(1)
    number = tl.load(encoded + lane) + record
    length = 0
    if number < tl.load(heads + lane):
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
    tl.store(lengths + lane * ring_frames + record, length)


@triton.jit(do_not_specialize=["ring_frames", "n"])
def _write(
    ring, jobs, heap, ring_frames, n,
    FRAME_BYTES: tl.constexpr, RUN_BYTES: tl.constexpr, ELEMENT_BYTES: tl.constexpr, ELEMENT: tl.constexpr,
    LONGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n_elements: tl.constexpr = FRAME_BYTES // ELEMENT_BYTES
    job = tl.program_id(0)
    lane = tl.load(jobs + job)
    number = tl.load(jobs + n + job)
    start = tl.load(jobs + 2 * n + job)
    length = (tl.load(jobs + 3 * n + job) & 0xFFFFFFFF).to(tl.int32)
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
        # The length of a run is known where the next one begins.
        size = (at - before - 1) % LONGEST + 1
        store_integer(heap, start + (rank - 1) * RUN_BYTES, size.to(tl.int64), begins & (rank > 0), RUN_BYTES)
        done += tl.sum(begins.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(changed, at, 0), 0))
    size = ((n_elements - last - 1) % LONGEST + 1).to(tl.int64)
    for i in tl.static_range(RUN_BYTES):
        tl.store(heap + start + (count - 1) * RUN_BYTES + i, ((size >> (8 * i)) & 0xFF).to(tl.uint8))


_launch_measure = Launcher(_measure, n_warps=4)
_launch_write = Launcher(_write, n_warps=4)


def _constants(frame_bytes: int, form: RunFormat) -> tuple[object, ...]:
    block = block_size(frame_bytes // form.element_bytes)
    return (frame_bytes, form.run_bytes, form.element_bytes, ELEMENTS[form.element_bytes], form.longest_run, block)


def measure_rle(lanes: Lanes, encoded: th.Tensor, form: RunFormat) -> th.Tensor:
    """See :func:`.rle_encode_torch.measure_rle`."""
    n_lanes, n_frames, frame_bytes = lanes.ring.shape
    lengths = th.empty((n_lanes, n_frames), dtype=th.int64, device=encoded.device)
    constants = _constants(frame_bytes, form)
    _launch_measure(
        encoded.device, (n_lanes, n_frames), constants, lanes.ring, lanes.heads, encoded, lengths, n_frames, *constants
    )
    return lengths


def write_rle(lanes: Lanes, jobs: Jobs, heap: th.Tensor, form: RunFormat) -> None:
    """See :func:`.rle_encode_torch.write_rle`."""
    _, n_frames, frame_bytes = lanes.ring.shape
    n, constants = jobs.table.shape[1], _constants(frame_bytes, form)
    _launch_write(heap.device, (n, 1), constants, lanes.ring, jobs.table, heap, n_frames, n, *constants)
