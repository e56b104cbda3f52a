"""``rle`` records made of waiting frames, in plain torch operations; see :mod:`.delta_encode_torch`."""

from __future__ import annotations

from typing import NamedTuple

import torch as th

from sb3_extra_buffers.gpu_buffers.kernels.frames import LENGTH_BITS
from sb3_extra_buffers.gpu_buffers.kernels.lanes import (
    Jobs,
    Lanes,
    gaps,
    integer_bytes,
    ring_frames,
    store_bytes,
    waiting_records,
)


class RunFormat(NamedTuple):
    """Of an :class:`~sb3_extra_buffers.codecs.rle.RleCodec`."""

    run_bytes: int
    element_bytes: int
    longest_run: int


def measure_rle(lanes: Lanes, encoded: th.Tensor, form: RunFormat) -> th.Tensor:
    """The length of each record that waits, (lanes, frames), or 0 where there is none."""
    numbers, complete = waiting_records(lanes, encoded, 1)
    which = th.arange(len(numbers), device=numbers.device)[:, None]
    begins = _begins(ring_frames(lanes, which, numbers[..., 0]), form)[0]
    lengths = begins.sum(-1) * (form.run_bytes + form.element_bytes)
    return th.where(complete, lengths.clamp(max=lanes.ring.shape[2]), 0)


def write_rle(lanes: Lanes, jobs: Jobs, heap: th.Tensor, form: RunFormat) -> None:
    """Write records that were measured to where there is room for them."""
    frames = ring_frames(lanes, jobs.lanes, jobs.numbers)
    raw = (jobs.packed & ((1 << LENGTH_BITS) - 1)) == lanes.ring.shape[2]
    store_bytes(heap, jobs.starts, frames, raw)

    begins, elements, sizes = _begins(frames, form)
    ranks = begins.to(th.int64).cumsum(-1) - 1
    valid = begins & ~raw[:, None]
    values_at = jobs.starts + form.run_bytes * begins.sum(-1)
    store_bytes(heap, values_at[:, None] + form.element_bytes * ranks, elements, valid)
    # The length of a run is known where the next one begins.
    runs_at = jobs.starts[:, None] + form.run_bytes * (ranks - 1)
    store_bytes(heap, runs_at, integer_bytes(sizes[:, :-1], form.run_bytes), valid & (ranks > 0))
    last = jobs.starts + form.run_bytes * ranks[:, -1]
    store_bytes(heap, last, integer_bytes(sizes[:, -1], form.run_bytes), ~raw)


def _begins(frames: th.Tensor, form: RunFormat) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
    """Where runs begin; the elements, (..., elements, bytes); and what the run before each would be long, if it ended
    there, for the end as well."""
    elements = frames.reshape(*frames.shape[:-1], -1, form.element_bytes)
    changed = th.ones(elements.shape[:-1], dtype=th.bool, device=frames.device)
    changed[..., 1:] = (elements[..., 1:, :] != elements[..., :-1, :]).any(-1)
    since = gaps(th.nn.functional.pad(changed, (0, 1), value=False))
    begins = changed | ((since[..., :-1] + 1) % form.longest_run == 0)
    sizes = since % form.longest_run + 1
    return begins, elements, sizes
