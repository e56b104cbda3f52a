"""Small faults, each of a kind that was made or could be: an exact text of the library, and what it becomes.

A text that is not found exactly once is an error, so that a fault cannot get lost when the library changes.
"""

from __future__ import annotations

from tests.histories.faults.buffers import BUFFER_FAULTS
from tests.histories.faults.codecs import CODEC_FAULTS
from tests.histories.faults.device import DEVICE_FAULTS
from tests.histories.faults.fault import Fault
from tests.histories.faults.segments import SEGMENT_FAULTS
from tests.histories.faults.sequences import SEQUENCE_FAULTS
from tests.histories.faults.storage import PLAIN_FAULTS, STORAGE_FAULTS

FAULTS = [
    *PLAIN_FAULTS,
    *STORAGE_FAULTS,
    *CODEC_FAULTS,
    *BUFFER_FAULTS,
    *DEVICE_FAULTS,
    *SEGMENT_FAULTS,
    *SEQUENCE_FAULTS,
]

__all__ = ["FAULTS", "Fault"]
