"""Frames of ``delta`` records, in plain torch operations. The format: :mod:`sb3_extra_buffers.codecs.delta`."""

from __future__ import annotations

import torch as th

from sb3_extra_buffers.codecs.delta import COUNT_MASK, KIND_SHIFT, PREVIOUS, WHOLE, ZERO
from sb3_extra_buffers.gpu_buffers.kernels.frames import DeviceFrames, Hints, complete, find_records, windows


def decode_delta_torch(frames: DeviceFrames, hints: Hints, lanes: th.Tensor, numbers: th.Tensor) -> th.Tensor:
    """The frames ``numbers`` of ``lanes``, ``(n, frame_bytes)``."""
    records = find_records(frames, lanes, numbers)
    group, n_words, n = frames.group, frames.table.shape[1], lanes.numel()
    headers = windows(frames.heap, records.starts, 4 * group).view(th.int32).reshape(n, group).to(th.int64)
    kinds, counts = (headers >> KIND_SHIFT) & 3, headers & COUNT_MASK
    counts = th.where(kinds == WHOLE, 0, counts)
    changed = th.where(kinds == WHOLE, n_words, counts)
    words_at = records.starts[:, None] + 4 * group + 4 * (changed.cumsum(1) - changed)
    skips_at = (records.starts + 4 * group + 4 * changed.sum(1))[:, None] + counts.cumsum(1) - counts

    most_changes = max((hints.longest - 4 * group) // 5, 1)
    column = th.arange(most_changes, device=lanes.device)
    base = frames.table[records.references]
    # One word more than there are: changes that are not there are written to it.
    decoded = base.new_empty((n, n_words + 1))
    decoded[:, :n_words] = base
    for link in range(group):
        wanted = records.positions >= link
        kind = kinds[:, link]
        if link:
            restart = (wanted & (kind != PREVIOUS))[:, None]
            decoded[:, :n_words] = th.where(restart, base, decoded[:, :n_words])
        decoded[:, :n_words].masked_fill_((wanted & (kind == ZERO))[:, None], 0)
        if hints.longest >= 4 * group + 4 * n_words:
            whole = windows(frames.heap, words_at[:, link], 4 * n_words).view(th.int32)
            decoded[:, :n_words] = th.where((wanted & (kind == WHOLE))[:, None], whole, decoded[:, :n_words])
        valid = (column < counts[:, link, None]) & wanted[:, None]
        steps = th.where(valid, windows(frames.heap, skips_at[:, link], most_changes).to(th.int64) + 1, 0)
        places = th.where(valid, steps.cumsum(1) - 1, n_words).clamp(max=n_words)
        words = windows(frames.heap, words_at[:, link], 4 * most_changes).view(th.int32)
        decoded.scatter_(1, places, words)
    # A copy, which contiguous() would not make of a single row: for wider numbers, the bytes must be aligned.
    decoded_bytes = decoded.view(th.uint8)[:, : frames.frame_bytes].clone(memory_format=th.contiguous_format)
    return complete(frames, hints, lanes, numbers, records, decoded_bytes)
