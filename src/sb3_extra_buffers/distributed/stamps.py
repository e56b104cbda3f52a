"""Indices of transitions in shards, with stamps that tell whether a transition is still there.

From the highest bit on: how often the shard was started again, how often the place was overwritten, the place. The
first two are counted modulo a power of two.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Indices

_LIFE_BITS, _GENERATION_BITS, _PLACE_BITS = 5, 18, 40


def generations_of(n_overwritten: Indices) -> Indices:
    """What a stamp has of the number of times that a place was overwritten."""
    return n_overwritten & ((1 << _GENERATION_BITS) - 1)


def stamped(places: Indices, generations: Indices, life: int) -> Indices:
    """
    :param life: How often the shard was started again.
    """
    lives = life & ((1 << _LIFE_BITS) - 1)
    indices: Indices = (lives << _GENERATION_BITS | generations) << _PLACE_BITS | places
    return indices


def unstamped(indices: Indices) -> tuple[Indices, Indices, Indices]:
    """Places, generations, and lives."""
    stamps = indices >> _PLACE_BITS
    return indices & ((1 << _PLACE_BITS) - 1), generations_of(stamps), stamps >> _GENERATION_BITS


def are_current(lives: Indices, lives_now: Indices) -> npt.NDArray[np.bool_]:
    """Whether the shards of some indices were not started again since."""
    current: npt.NDArray[np.bool_] = lives == lives_now & ((1 << _LIFE_BITS) - 1)
    return current
