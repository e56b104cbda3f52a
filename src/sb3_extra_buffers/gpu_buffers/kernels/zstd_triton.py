"""Observations rebuilt from ``zstd`` records: a launch finds the records of a batch, and nvCOMP decodes all of them."""

from __future__ import annotations

import torch as th
import triton
import triton.language as tl

from sb3_extra_buffers.gpu_buffers import nvcomp
from sb3_extra_buffers.gpu_buffers.kernels.batch import ObservationBatch, field_arguments, field_constants, field_type
from sb3_extra_buffers.gpu_buffers.kernels.device_functions import copy_fields
from sb3_extra_buffers.gpu_buffers.kernels.frames import LENGTH_BITS, DeviceFrames
from sb3_extra_buffers.gpu_buffers.kernels.gather_triton import first_frame
from sb3_extra_buffers.gpu_buffers.kernels.launching import Launcher

_LENGTH_MASK = tl.constexpr((1 << LENGTH_BITS) - 1)


@triton.jit(do_not_specialize=["n", "n_envs", "capacity"])
def _find_records(
    places, ends_0, ends_1, records, heap, out_0, out_1, jobs, fields, actions, rewards, dones,
    n, n_envs, capacity,
    STACK: tl.constexpr, PAIR: tl.constexpr, FRAME_BYTES: tl.constexpr,
    ROW_WORDS: tl.constexpr, ACTION_WORDS: tl.constexpr, ACTION_BLOCK: tl.constexpr,
    ACTIONS_AT: tl.constexpr, REWARDS_AT: tl.constexpr, DONES_AT: tl.constexpr, TIMEOUTS_AT: tl.constexpr,
):  # fmt: skip
    """A program for each frame of each observation: where its record is, how long, and where the frame is wanted."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    slot = tl.load(places + row)
    lane = tl.load(places + (1 + PAIR) * n + row)
    at = place % STACK
    number = first_frame(ends_0, slot, n_envs, lane, STACK) + at
    target = out_0.to(tl.int64)
    if PAIR:
        if place >= STACK:
            number = first_frame(ends_1, tl.load(places + n + row), n_envs, lane, STACK) + at
            target = out_1.to(tl.int64)
    if ACTION_WORDS > 0:
        if place == 0:
            copy_fields(
                fields, slot, lane, row, actions, rewards, dones,
                ROW_WORDS, ACTION_WORDS, ACTION_BLOCK, ACTIONS_AT, REWARDS_AT, DONES_AT, TIMEOUTS_AT,
            )  # fmt: skip
    entry = records + 2 * (lane * capacity + number % capacity)
    per_row: tl.constexpr = STACK * (1 + PAIR)
    job = jobs + row * per_row + place
    tl.store(job, heap.to(tl.int64) + tl.load(entry))
    tl.store(job + n * per_row, tl.load(entry + 1) & _LENGTH_MASK)
    tl.store(job + 2 * n * per_row, target + (row * STACK + at) * FRAME_BYTES)


_launch = Launcher(_find_records, n_warps=1)


def gather_zstd(frames: DeviceFrames, batch: ObservationBatch) -> None:
    """Fill the outputs of ``batch``. Each frame must be in a compressed record of its own: nvCOMP survives no other.

    Frames that several observations share are decoded for each of them: the time is that of the slowest record.
    """
    places, ends, outs, fields = batch
    n, n_outs = places.shape[1], len(outs)
    jobs = th.empty((3, n * frames.stack * n_outs), dtype=th.int64, device=outs[0].device)
    constants = frames.stack, n_outs - 1, frames.frame_bytes, *field_constants(fields)
    _launch(
        outs[0].device, (n, frames.stack * n_outs), (constants, field_type(fields)),
        places, ends[0], ends[-1], frames.records, frames.heap, outs[0], outs[-1], jobs,
        *field_arguments(fields, outs[0]), n, ends[0].shape[1], frames.records.shape[1], *constants,
    )  # fmt: skip
    sources, lengths, targets = jobs.unbind(0)
    nvcomp.decompress(sources, lengths, targets, frames.frame_bytes)
