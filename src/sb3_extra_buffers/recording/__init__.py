"""Record what an agent saw, did and got, as data or as a video."""

from __future__ import annotations

from sb3_extra_buffers.recording.record_buffer import (
    BaseRecordBuffer,
    DummyRecordBuffer,
    FramelessRecordBuffer,
    Record,
    RecordBuffer,
    Records,
)
from sb3_extra_buffers.recording.recorders import RecordCallback, RecordEnv

__all__ = [
    "BaseRecordBuffer",
    "DummyRecordBuffer",
    "FramelessRecordBuffer",
    "Record",
    "RecordBuffer",
    "RecordCallback",
    "RecordEnv",
    "Records",
]
