"""Counting in lanes."""

from __future__ import annotations

import numpy as np

from sb3_extra_buffers.codecs.base import Indices


def numbers_from(firsts: Indices, counts: Indices) -> tuple[Indices, Indices]:
    """For each lane, the ``counts`` numbers from ``firsts`` on. Returns their lanes, and the numbers, lane by lane."""
    lanes = np.repeat(np.arange(len(counts)), counts)
    return lanes, np.arange(len(lanes)) + (firsts - (np.cumsum(counts) - counts))[lanes]
