"""Record the frames that an agent saw, its actions and its rewards, as data or as a video."""

from __future__ import annotations

from sb3_extra_buffers.compatibility import serve_old_names
from sb3_extra_buffers.recording.record_buffer import (
    BaseRecordBuffer,
    DummyRecordBuffer,
    FramelessRecordBuffer,
    Record,
    RecordBuffer,
    Records,
)
from sb3_extra_buffers.recording.record_callback import RecordCallback

__all__ = [
    "BaseRecordBuffer",
    "DummyRecordBuffer",
    "FramelessRecordBuffer",
    "Record",
    "RecordBuffer",
    "RecordCallback",
    "Records",
]

serve_old_names(__name__)
