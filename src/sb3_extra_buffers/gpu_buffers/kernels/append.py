"""Observations appended to the lanes of their environments, one step in one launch.

A program takes the observations of one environment and does what
:func:`sb3_extra_buffers.storage.matching.append_new_frames` does on the host.
"""

from __future__ import annotations

import torch as th
import triton
import triton.language as tl

from sb3_extra_buffers.gpu_buffers.kernels import DeviceFrames, Launcher, block_size


@triton.jit
def _continues(observation, ring, head, new, ring_frames, STACK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Whether all but the last ``new`` frames of an observation are the last ones of the one before."""
    different = 0
    frame = 0
    while (frame < STACK - new) & (different == 0):
        before = (head - STACK + new + frame) % ring_frames * SIZE
        for begin in range(0, SIZE, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            mine = tl.load(observation + frame * SIZE + at, mask=at < SIZE, other=0)
            differs = mine != tl.load(ring + before + at, mask=at < SIZE, other=0)
            different += tl.sum(differs.to(tl.int32), 0)
        frame += 1
    return different == 0


@triton.jit
def _take(
    observation, ring, head, is_known, ring_frames, STACK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Append what is new in an observation, and return the number of the frame after its last one."""
    found = (is_known == 0).to(tl.int32)
    new = found * STACK
    while (found == 0) & (new < STACK):
        found = _continues(observation, ring, head, new, ring_frames, STACK, SIZE, BLOCK).to(tl.int32)
        new += 1 - found
    for frame in range(STACK - new, STACK):
        target = (head + frame - STACK + new) % ring_frames * SIZE
        for begin in range(0, SIZE, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            values = tl.load(observation + frame * SIZE + at, mask=at < SIZE)
            tl.store(ring + target + at, values, mask=at < SIZE)
    # The next observation is compared with what other threads of the program have just written.
    tl.debug_barrier()
    return head + new


@triton.jit(do_not_specialize=["slot_0", "slot_1", "n_lanes", "ring_frames"])
def _append(
    observations_0, observations_1, lanes, ring, heads, known, ends_0, ends_1, slot_0, slot_1, n_lanes, ring_frames,
    STACK: tl.constexpr, PAIR: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + row)
    own_ring = ring + lane * ring_frames * SIZE
    head = tl.load(heads + lane)
    is_known = tl.load(known + lane)
    head = _take(observations_0 + row * STACK * SIZE, own_ring, head, is_known, ring_frames, STACK, SIZE, BLOCK)
    tl.store(ends_0 + slot_0 * n_lanes + lane, head.to(tl.int32))
    if PAIR:
        is_known = is_known * 0 + 1
        head = _take(observations_1 + row * STACK * SIZE, own_ring, head, is_known, ring_frames, STACK, SIZE, BLOCK)
        tl.store(ends_1 + slot_1 * n_lanes + lane, head.to(tl.int32))
    tl.store(heads + lane, head)
    tl.store(known + lane, 1)


_launch = Launcher(_append, n_warps=4)


def append_observations(
    frames: DeviceFrames, lanes: th.Tensor, observations: list[th.Tensor], ends: list[th.Tensor], slots: list[int]
) -> None:
    """Append one or two observations to each of ``lanes``.

    :param lanes: ``int64``, (n,): which lanes.
    :param observations: For each, ``uint8``, (n, stack, frame_bytes).
    :param ends: For each, ``int32`` (slots, lanes): gets the number of the frame after the observation's last one...
    :param slots: ... in this row.
    """
    ring, n_lanes = frames.ring, frames.ring.shape[0]
    words = frames.frame_bytes % 4 == 0
    if words:
        ring, observations = ring.view(th.int32), [part.view(th.int32) for part in observations]
    size = ring.shape[2]
    constants = (frames.stack, int(len(observations) > 1), size, block_size(size))
    _launch(
        ring.device, (len(lanes), 1), (words, constants),
        observations[0], observations[-1], lanes, ring, frames.heads, frames.known, ends[0], ends[-1],
        slots[0], slots[-1], n_lanes, frames.ring_frames, *constants,
    )  # fmt: skip
