"""Frames of ``rle`` records, in plain torch operations. The format: :mod:`sb3_extra_buffers.codecs.rle`."""

from __future__ import annotations

import torch as th

from sb3_extra_buffers.gpu_buffers.kernels.frames import DeviceFrames, Hints, complete, find_records, windows


def decode_rle_torch(
    frames: DeviceFrames, hints: Hints, lanes: th.Tensor, numbers: th.Tensor, run_bytes: int, element_bytes: int
) -> th.Tensor:
    """The frames ``numbers`` of ``lanes``, ``(n, frame_bytes)``."""
    records = find_records(frames, lanes, numbers)
    n, n_elements = lanes.numel(), frames.frame_bytes // element_bytes
    most_runs = max(hints.longest // (run_bytes + element_bytes), 1)
    counts = records.lengths // (run_bytes + element_bytes)
    valid = th.arange(most_runs, device=lanes.device) < counts[:, None]

    stored = windows(frames.heap, records.starts, most_runs * run_bytes).reshape(n, most_runs, run_bytes)
    runs = sum(stored[:, :, i].to(th.int64) << (8 * i) for i in range(run_bytes))
    runs = th.where(valid, runs, 0)
    values = windows(frames.heap, records.starts + counts * run_bytes, most_runs * element_bytes)
    values = values.reshape(n, most_runs, element_bytes)

    # A run begins where those before it end. Counting the beginnings up to an element gives the number of its run.
    begins = th.where(valid, runs.cumsum(1) - runs, n_elements).clamp(0, n_elements)
    marks = th.zeros((n, n_elements + 1), dtype=th.int64, device=lanes.device)
    marks.scatter_(1, begins, 1)
    number = (marks[:, :n_elements].cumsum(1) - 1).clamp(0, most_runs - 1)
    decoded = values.gather(1, number[:, :, None].expand(-1, -1, element_bytes)).reshape(n, frames.frame_bytes)
    return complete(frames, hints, lanes, numbers, records, decoded)
