"""Helpers for record buffers."""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.recording.base import BaseRecordBuffer
from sb3_extra_buffers.recording.record_buffer import RecordBuffer


def force_alloc_mem(mem: BaseRecordBuffer, val: Any = 0) -> None:
    """Make the system provide, now, the memory of rewards, actions and features, by writing ``val`` to unused slots.

    A system may promise memory that it does not have, and only find out when it is written to. Compressed frames ask
    for memory as they come: how much they need is not known before.
    """
    if not isinstance(mem, RecordBuffer):
        return
    unused = np.setdiff1d(np.arange(mem.max_size), mem.slots)
    for array in (mem.rewards, mem.actions, mem.features):
        if array is not None:
            array[unused] = val
