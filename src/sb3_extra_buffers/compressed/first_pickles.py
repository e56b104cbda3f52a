"""Pickles of buffers that version 1.0.0.dev0 wrote. They hold attributes of objects instead of a saved state."""

from __future__ import annotations

from typing import Any

from sb3_extra_buffers.storage.locking import BufferLock


def restore_first_pickles(buffer: Any, attributes: dict[str, Any]) -> None:
    """Give a buffer the attributes that its pickle holds, and those that were added later."""
    device = attributes.get("device")  # of a buffer that was pickled when this was an attribute
    vars(buffer).update({name: value for name, value in attributes.items() if name != "device"})
    if "_lock" not in attributes:
        buffer._lock = BufferLock()
        for store in buffer._stores.values():
            store.lock = buffer._lock
    if device is not None:
        buffer.device = device
