"""Circular records of what an agent saw, did and got, as data or as a video."""

from __future__ import annotations

from sb3_extra_buffers.recording.base import BaseRecordBuffer, Record, Records
from sb3_extra_buffers.recording.dummy_record_buffers import DummyRecordBuffer, FramelessRecordBuffer
from sb3_extra_buffers.recording.feeding import RecordCallback, RecordEnv
from sb3_extra_buffers.recording.record_buffer import RecordBuffer

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
