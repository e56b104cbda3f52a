"""Counting in lanes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.storage.memory import zeros


def numbers_from(firsts: Indices, counts: Indices) -> tuple[Indices, Indices]:
    """For each lane, the ``counts`` numbers from ``firsts`` on. Returns their lanes, and the numbers, lane by lane."""
    lanes = np.repeat(np.arange(len(counts)), counts)
    return lanes, np.arange(len(lanes)) + (firsts - (np.cumsum(counts) - counts))[lanes]


def frames_in_use(columns: list[npt.NDArray[np.uint32]], stack: int) -> Indices:
    """How many frames of each lane belong to observations that end at the numbers in ``columns``."""
    n_slots, n_lanes = columns[0].shape
    counts = np.zeros(n_lanes, dtype=np.int64)
    ends, gaps = zeros((2, len(columns) * n_slots), np.dtype(np.uint32))
    for lane in range(n_lanes):
        np.concatenate([column[:, lane] for column in columns], out=ends)
        ends.sort()
        # An observation has all its frames for itself, except for those of the one that ends before it.
        gaps[0] = ends[0]
        np.subtract(ends[1:], ends[:-1], out=gaps[1:])
        counts[lane] = np.minimum(gaps, np.uint32(stack), out=gaps).sum(dtype=np.int64)
    return counts
