"""Helpers for record buffers."""

from __future__ import annotations

from typing import Any

import numpy as np

from sb3_extra_buffers.recording.record_buffer import BaseRecordBuffer, RecordBuffer


def force_alloc_mem(mem: BaseRecordBuffer, val: Any = 0) -> None:
    """Allocate the memory of rewards, actions and features now, by writing ``val`` to unused slots, which keep it.

    The system allocates memory only when it is first written to, so without this call, memory may run out long after
    the buffer was created. Frames are not included: how much memory they need depends on how well they compress.
    """
    if not isinstance(mem, RecordBuffer):
        return
    unused = np.setdiff1d(np.arange(mem.max_size), mem.slots)
    for array in (mem.rewards, mem.actions, mem.features):
        if array is not None:
            array[unused] = val
