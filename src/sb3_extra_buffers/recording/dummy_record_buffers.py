"""Record buffers that keep less, to be put where a :class:`RecordBuffer` is expected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.recording.base import BaseRecordBuffer, Record
from sb3_extra_buffers.recording.record_buffer import RecordBuffer


class FramelessRecordBuffer(RecordBuffer):
    """A :class:`RecordBuffer` that drops frames. Its ``frames`` are zeros that take no memory."""

    has_frames = False

    def _create_frames(self) -> None:
        zero = np.zeros((), dtype=self.dtypes[0])
        self.frames = np.broadcast_to(zero, (self.max_size, self.ch_num, *self.res))

    def _write_frame(self, slot: int, frame: Any) -> None:
        pass

    def _frames_of(self, slots: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[Any]]:
        return iter(self.frames[: len(slots)])

    def _frames_nbytes(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} of {self.max_size:,} steps)"


class DummyRecordBuffer(BaseRecordBuffer):
    """Accepts everything, keeps nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.frames = np.zeros((0, 0, 0, 0), dtype=np.uint8)
        self.rewards = np.zeros(0, dtype=np.float32)
        self.actions = np.zeros(0, dtype=np.int64)
        self.features = None

    def add(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Record:
        raise IndexError(f"There is no step {index}: this buffer keeps nothing.")

    def __iter__(self) -> Iterator[Record]:
        return iter(())
