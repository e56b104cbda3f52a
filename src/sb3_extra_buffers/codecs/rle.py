"""``rle``: runs of equal elements, in NumPy. This file defines the format; ``rle-jit`` writes the same bytes.

A record is the lengths of its runs, followed by the element of each run. There is no header: a run length and an
element have known sizes, so the number of runs follows from the length of the record. Elements are compared as the
unsigned integers that share their bits, so that ``-0.0`` and every kind of NaN survive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Bytes, FrameSpec, RecordCodec
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError

Unsigned = npt.NDArray[np.unsignedinteger[Any]]

_UNSIGNED = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.uint64))


def element_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The unsigned integer of the same size as ``dtype`` or, if there is none, the largest whose size divides it."""
    return next(word for word in reversed(_UNSIGNED) if dtype.itemsize % word.itemsize == 0)


def run_dtype(runs_type: npt.DTypeLike | None, element_count: int) -> np.dtype[Any]:
    """The unsigned integer for run lengths: as wide as ``runs_type``, or by default as wide as needed."""
    if runs_type is None:
        return next(word for word in _UNSIGNED if element_count <= np.iinfo(word).max)
    try:
        dtype = np.dtype(runs_type)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "iu":
        raise ConfigurationError(f"runs_type must be an integer type, such as np.uint16, not {runs_type!r}.")
    return np.dtype(f"u{dtype.itemsize}")


class RleCodec(RecordCodec):
    """Run-length encoding. Runs that are too long for ``runs_type`` are split."""

    name = "rle"

    def __init__(self, frame: FrameSpec, *, runs_type: npt.DTypeLike | None = None) -> None:
        super().__init__(frame)
        self.element_type = element_dtype(frame.dtype)
        self.element_count = frame.nbytes // self.element_type.itemsize
        self.runs_type = run_dtype(runs_type, self.element_count)
        self.longest_run = min(int(np.iinfo(self.runs_type).max), self.element_count)

    def _encode_record(self, record: Bytes) -> bytes:
        elements: Unsigned = np.ascontiguousarray(record).view(self.element_type)
        starts = np.concatenate(([0], np.flatnonzero(elements[1:] != elements[:-1]) + 1))
        runs = np.diff(starts, append=len(elements))
        values = elements[starts]
        pieces = -(-runs // self.longest_run)
        if pieces.max() > 1:
            last_pieces = np.cumsum(pieces) - 1
            remainders = runs - (pieces - 1) * self.longest_run
            runs = np.full(pieces.sum(), self.longest_run)
            runs[last_pieces] = remainders
            values = np.repeat(values, pieces)
        return runs.astype(self.runs_type).tobytes() + values.tobytes()

    def _decode_record(self, payload: memoryview) -> memoryview:
        run_size = self.runs_type.itemsize
        count, rest = divmod(len(payload), run_size + self.element_type.itemsize)
        if rest:
            raise CorruptDataError(f"it cannot have {len(payload)} bytes")
        # A record may start at any byte of the arena. It is copied, because integers must be aligned.
        runs = np.frombuffer(payload[: count * run_size].tobytes(), dtype=self.runs_type)
        values = np.frombuffer(payload[count * run_size :].tobytes(), dtype=self.element_type)
        # Each run length is checked as well, because the sum of large ones may overflow.
        if count == 0 or runs.max() > self.element_count or int(runs.sum(dtype=np.uint64)) != self.element_count:
            raise CorruptDataError(f"its runs do not add up to {self.element_count} elements")
        return np.repeat(values, runs.astype(np.intp)).view(np.uint8).data
