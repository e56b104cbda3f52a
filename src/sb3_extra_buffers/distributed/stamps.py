"""Indices of transitions in shards, each with a stamp that tells whether the transition has been replaced since.

An index consists of three numbers, from the highest bit on: the shard's restart count, the *generation*, which counts
how many times the place was overwritten, and the place. Both counts are modulo a power of two.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Indices

_RESTART_BITS, _GENERATION_BITS, _PLACE_BITS = 5, 18, 40


def generations_of(n_overwritten: Indices) -> Indices:
    """Turn the number of times that places were overwritten into generations, which have fewer bits."""
    return n_overwritten & ((1 << _GENERATION_BITS) - 1)


def stamped(places: Indices, generations: Indices, restarts: int) -> Indices:
    """Combine places, their generations and the restart count of their shard into indices."""
    restarts &= (1 << _RESTART_BITS) - 1
    indices: Indices = (restarts << _GENERATION_BITS | generations) << _PLACE_BITS | places
    return indices


def unstamped(indices: Indices) -> tuple[Indices, Indices, Indices]:
    """Split indices into places, generations and restart counts."""
    stamps = indices >> _PLACE_BITS
    return indices & ((1 << _PLACE_BITS) - 1), generations_of(stamps), stamps >> _GENERATION_BITS


def are_current(restarts: Indices, restarts_now: Indices) -> npt.NDArray[np.bool_]:
    """Whether the restart count in each index is still the restart count of its shard."""
    current: npt.NDArray[np.bool_] = restarts == restarts_now & ((1 << _RESTART_BITS) - 1)
    return current
