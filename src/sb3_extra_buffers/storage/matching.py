"""Which frames of an observation are there already?

An observation that arrives is compared with the newest frames of its lane. If it equals the newest observation (SB3
hands over ``next_obs`` and then the same values as the next ``obs``), nothing is stored. If it continues it, as a stack that
moves on by one frame does, only the frames at its end are new. In the worst case all of them are. Content decides, so
the result is exact whatever the environment does.
"""

from __future__ import annotations

import numpy as np

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.compiled import load_kernels


def append_unless_known(
    lanes: Indices, observations: Bytes, ring: Bytes, heads: Indices, floors: Indices, encoded: Indices
) -> tuple[Indices, int]:
    """Append to each lane what is new in its observation.

    Returns the frame number after each observation's last frame, and the most frames that wait in any lane.
    """
    compiled = load_kernels("sb3_extra_buffers.storage.kernels")
    if compiled is None:
        return append_unless_known_numpy(lanes, observations, ring, heads, floors, encoded)
    ends = np.empty(len(lanes), dtype=np.int64)
    waiting = compiled.append_unless_known(lanes, observations, ring, heads, floors, encoded, ends)
    return ends, waiting


def append_unless_known_numpy(
    lanes: Indices, observations: Bytes, ring: Bytes, heads: Indices, floors: Indices, encoded: Indices
) -> tuple[Indices, int]:
    """The reference, and the way without numba."""
    stack, ring_size = observations.shape[1], ring.shape[1]
    for lane, observation in zip(lanes.tolist(), observations, strict=True):
        new = 0
        for new in range(stack + 1):
            first = int(heads[lane]) - stack + new
            known = np.arange(first, heads[lane]) % ring_size
            if new == stack or (first >= floors[lane] and np.array_equal(ring[lane, known], observation[: stack - new])):
                break
        ring[lane, np.arange(heads[lane], heads[lane] + new) % ring_size] = observation[stack - new :]
        heads[lane] += new
    return heads[lanes], int((heads[lanes] - encoded[lanes]).max())
