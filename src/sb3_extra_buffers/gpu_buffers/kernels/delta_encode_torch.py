"""``delta`` records made of waiting frames, in plain torch operations.

The format: :mod:`sb3_extra_buffers.codecs.delta`. It takes two steps, because the host has to find room in between:
frames are measured, then records are written.
"""

from __future__ import annotations

import torch as th

from sb3_extra_buffers.codecs.delta import COUNT_MASK, KIND_SHIFT, PREVIOUS, REFERENCE, WHOLE, ZERO
from sb3_extra_buffers.gpu_buffers.kernels.frames import LENGTH_BITS
from sb3_extra_buffers.gpu_buffers.kernels.lanes import (
    Jobs,
    Lanes,
    as_words,
    gaps,
    integer_bytes,
    ring_frames,
    store_bytes,
    waiting_records,
)

REACH = 256
"""A change is at most so many words after the one before."""


def measure_delta(
    lanes: Lanes, encoded: th.Tensor, table: th.Tensor, references: th.Tensor, headers: th.Tensor, group: int
) -> th.Tensor:
    """The length of each record that waits, (lanes, records), or 0 where there is none.

    ``headers``, (lanes, frames), gets the first word of each frame, at its position in the ring.
    """
    numbers, complete = waiting_records(lanes, encoded, group)
    which = th.arange(len(numbers), device=numbers.device)[:, None, None]
    words = as_words(ring_frames(lanes, which, numbers))
    n_words, frame_bytes = words.shape[-1], lanes.ring.shape[2]
    bases = table[references][:, None, None]
    counts = _count(words != _previous(words, bases))
    kinds = th.full_like(counts, PREVIOUS)
    many = 8 * counts > n_words
    for kind, base in ((REFERENCE, bases), (ZERO, th.zeros_like(bases))):
        others = _count(words != base)
        better = many & (others < counts)
        kinds, counts = th.where(better, kind, kinds), th.where(better, others, counts)
    whole = 5 * counts >= 4 * n_words
    kinds, counts = th.where(whole, WHOLE, kinds), th.where(whole, 0, counts)
    headers[which, numbers % headers.shape[1]] = (kinds << KIND_SHIFT | counts).to(th.int32)
    lengths = 4 * group + th.where(whole, 4 * n_words, 5 * counts).sum(-1)
    return th.where(complete, lengths.clamp(max=group * frame_bytes), 0)


def write_delta(lanes: Lanes, table: th.Tensor, headers: th.Tensor, jobs: Jobs, heap: th.Tensor, group: int) -> None:
    """Write records that were measured to where there is room for them."""
    numbers = jobs.numbers[:, None] + th.arange(group, device=heap.device)
    which = jobs.lanes[:, None]
    frames = ring_frames(lanes, which, numbers)
    lengths = jobs.packed & ((1 << LENGTH_BITS) - 1)
    raw = lengths == group * lanes.ring.shape[2]
    store_bytes(heap, jobs.starts, frames.flatten(1), raw)

    words = as_words(frames)
    n_words = words.shape[-1]
    stored = headers[which, numbers % headers.shape[1]].to(th.int64)
    kinds, counts = (stored >> KIND_SHIFT) & 3, stored & COUNT_MASK
    is_whole = kinds == WHOLE
    n_changed = th.where(is_whole, n_words, counts)
    words_at = jobs.starts[:, None] + 4 * group + 4 * (n_changed.cumsum(1) - n_changed)
    skips_at = (jobs.starts + 4 * group + 4 * n_changed.sum(1))[:, None] + counts.cumsum(1) - counts
    encoded = ~raw[:, None]
    headers_at = jobs.starts[:, None] + 4 * th.arange(group, device=heap.device)
    store_bytes(heap, headers_at, integer_bytes(stored, 4), encoded)

    bases = table[jobs.packed >> LENGTH_BITS][:, None]
    before = th.where((kinds == PREVIOUS)[..., None], _previous(words, bases), bases)
    changed = words != th.where((kinds == ZERO)[..., None], 0, before)
    skipped = gaps(changed)
    at = th.arange(n_words, device=heap.device)
    last = th.where(changed, at, -1).amax(-1, keepdim=True)
    emitted = changed | ((skipped % REACH == REACH - 1) & (at < last))
    emitted |= is_whole[..., None]
    ranks = emitted.to(th.int64).cumsum(-1) - 1
    valid = emitted & encoded[..., None]
    store_bytes(heap, words_at[..., None] + 4 * ranks, integer_bytes(words.to(th.int64), 4), valid)
    skips = (skipped % REACH).to(th.uint8)[..., None]
    store_bytes(heap, skips_at[..., None] + ranks, skips, valid & ~is_whole[..., None])


def _previous(words: th.Tensor, bases: th.Tensor) -> th.Tensor:
    """What each frame of records, (..., frames, words), is compared with first."""
    return th.cat([bases.expand_as(words[..., :1, :]), words[..., :-1, :]], dim=-2)


def _count(changed: th.Tensor) -> th.Tensor:
    """How many words are written for the changes of each frame, those that bridge large gaps included."""
    return th.where(changed, 1 + gaps(changed) // REACH, 0).sum(-1)
