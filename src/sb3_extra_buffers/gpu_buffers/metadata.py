"""Where the parts of a run-length record lie."""

from __future__ import annotations

from typing import NamedTuple


class SlotMetadata(NamedTuple):
    """The layout of one ``rle`` record in a heap. Positions are relative to the record's own start, ``byte_start``."""

    byte_start: int
    pos_runs: int
    """Where the run lengths begin."""
    pos_elem: int
    """Where the elements begin, one for each run."""
    run_length: int
    """The number of runs."""
    payload_bytes: int

    @classmethod
    def of_record(cls, byte_start: int, payload_bytes: int, run_bytes: int, element_bytes: int) -> SlotMetadata:
        """The layout of a record of ``payload_bytes`` bytes whose run lengths and elements have these sizes."""
        run_length = payload_bytes // (run_bytes + element_bytes)
        return cls(byte_start, 0, run_length * run_bytes, run_length, payload_bytes)
