"""Observations appended to the lanes of their environments, in plain torch operations."""

from __future__ import annotations

import torch as th

from sb3_extra_buffers.gpu_buffers.kernels.lanes import Lanes


def append_observations(lanes: Lanes, observations: list[th.Tensor], ends: list[th.Tensor], slots: list[int]) -> None:
    """Append observations, each (lanes, stack, frame_bytes), one after the other, sharing frames with the one before.

    The number of the frame after the last one of ``observations[i]`` goes to row ``slots[i]`` of ``ends[i]``.
    """
    for frames, numbers, slot in zip(observations, ends, slots, strict=True):
        _append(lanes, frames)
        numbers[slot] = lanes.heads.to(th.int32)


def _append(lanes: Lanes, frames: th.Tensor) -> None:
    n_lanes, stack, _ = frames.shape
    which = th.arange(n_lanes, device=frames.device)[:, None]
    steps = th.arange(stack, device=frames.device)
    size = lanes.ring.shape[1]
    before = lanes.ring[which, (lanes.heads[:, None] - stack + steps) % size]
    # Without the frames that are new, an observation is the end of the one before: the fewest that this holds for.
    new = th.full_like(lanes.heads, stack)
    for count in range(stack - 1, -1, -1):
        same = (frames[:, : stack - count] == before[:, count:]).flatten(1).all(1)
        new = th.where(same & (lanes.known != 0), count, new)
    lanes.heads.add_(new)
    lanes.known.fill_(1)
    # Frames that are not new are written as they are already there.
    lanes.ring[which, (lanes.heads[:, None] - stack + steps) % size] = frames
