"""The contract between the storage layer and a compression method.

A buffer cuts every observation into *frames* of equal size (an observation that is not a stack is one frame) and
keeps, per environment, the frames in the order in which they arrived: a *lane*. ``frames_per_record`` consecutive
frames of one lane make a *record*, the unit that a codec turns into bytes and back.

Codecs work on batches of records, never on single ones, because the cost of a call from Python is larger than
that of compressing a small frame. They see frames as plain bytes, so that every dtype survives bit for bit.

Two rules let the store stay free of per-record headers:

* A record whose encoded form would not be smaller is stored as it is, and a record of exactly ``record_bytes`` bytes
  is therefore a raw one. :class:`RecordCodec` takes care of that for codecs that handle one record at a time.
* What a record needs beside its own bytes (a key frame, a dictionary) is a *reference*, known by a number that the
  store keeps next to the record and hands back to :meth:`Codec.release` when the record is gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

NO_REFERENCE = 0
"""The reference number of records that need nothing but their own bytes."""
_NO_FRAMES: Words = np.zeros((0, 1), dtype=np.uint32)
_NO_DICTIONARIES: Indices = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class FrameSpec:
    """What one frame is: ``size`` elements of type ``dtype``."""

    size: int
    dtype: np.dtype[Any]
    channels: int = 1
    """Values that make up one pixel."""
    channels_last: bool = False
    """Whether the values of a pixel lie together; otherwise all first values come first."""

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class Encoded(NamedTuple):
    """Records as bytes: ``data`` holds them back to back, record ``i`` being ``lengths[i]`` bytes long."""

    data: Bytes
    lengths: Indices
    references: Indices


class Codec(ABC):
    """One compression method, configured for frames of one kind.

    Subclasses take ``(frame, *, option=default, ...)``; the registry builds them and turns a misspelt option into a
    clear error. Instances hold only arrays and plain values, or drop the rest when pickled.
    """

    name: ClassVar[str]
    """The method's name without a level, as users write it."""
    levels: ClassVar[range | tuple[int, ...]] = ()
    """Compression levels that the method accepts; empty where it has none."""

    record_format: ClassVar[Literal["raw", "delta", "zstd"] | None] = None
    """A format for which :mod:`sb3_extra_buffers.storage.gathering` has a compiled kernel; otherwise ``None``."""

    frames_per_record: int = 1

    def __init__(self, frame: FrameSpec) -> None:
        self.frame = frame

    @property
    def record_bytes(self) -> int:
        """Size of a raw record."""
        return self.frames_per_record * self.frame.nbytes

    @property
    def max_encoded_size(self) -> int:
        """The most bytes that one record can take in the store."""
        return self.record_bytes

    @property
    def min_encoded_size(self) -> int:
        """The fewest bytes that one record can take."""
        return 1

    @property
    def label(self) -> str:
        """The method as a user would write it, level included."""
        return self.name

    @property
    def reference_bytes(self) -> int:
        """Memory held by references now."""
        return 0

    @property
    def reference_frames(self) -> Words:
        """With the format ``"delta"``: the reference frames by number, ``(n, words)``."""
        return _NO_FRAMES

    @property
    def dictionary_addresses(self) -> Indices:
        """With the format ``"zstd"``: libzstd's dictionaries by reference number; see :mod:`.libzstd`."""
        return _NO_DICTIONARIES

    @abstractmethod
    def encode(self, records: Bytes, lanes: Indices) -> Encoded:
        """Compress ``records``, an ``(n, record_bytes)`` array whose row ``i`` belongs to lane ``lanes[i]``."""

    @abstractmethod
    def decode(self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes) -> None:
        """Rebuild records into the rows of ``out``, an ``(n, record_bytes)`` array.

        Record ``i`` lies at ``data[starts[i] : starts[i] + lengths[i]]``. Bytes that were not written by
        :meth:`encode` raise :class:`~sb3_extra_buffers.errors.CorruptDataError`. It runs in several threads at once.
        """

    def release(self, references: Indices) -> None:  # noqa: B027  # most codecs have no references
        """Forget one use of each reference; called when records leave the store."""

    def count_uses(self, references: Indices) -> bool:
        """Count uses anew, ``references`` being those of all records; false if one of them is not there.

        For records from a file, and for when an exception struck between encoding records and storing them.
        """
        return not references.any()

    def check(self, references: Indices) -> None:
        """Raise :class:`~sb3_extra_buffers.errors.CorruptDataError` unless all records, whose references are given, can
        be decoded and no reference is kept, or counted, without need."""
        if references.any():
            raise CorruptDataError(f"A record of the method {self.label!r}, which has no references, names one.")

    def state(self) -> State:
        """What was learnt from frames, for :mod:`sb3_extra_buffers.persistence`."""
        return {}

    def restore(self, state: SavedState) -> None:  # noqa: B027  # most codecs learn nothing
        """Take over what :meth:`state` gave, in a codec that was made with the same arguments.

        Uses of references are not part of it: :meth:`count_uses` follows.
        """


class RecordCodec(Codec):
    """A codec that encodes and decodes one record at a time."""

    def encode(self, records: Bytes, lanes: Indices) -> Encoded:
        encoded = [self._encode_record(record) for record in records]
        kept = [
            data if len(data) < self.record_bytes else record for data, record in zip(encoded, records, strict=True)
        ]
        lengths = np.fromiter(map(len, kept), dtype=np.int64, count=len(kept))
        data = np.frombuffer(b"".join(map(memoryview, kept)), dtype=np.uint8)  # type: ignore[arg-type]
        return Encoded(data, lengths, np.full(len(kept), NO_REFERENCE))

    def decode(self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes) -> None:
        for row, start, length in zip(out, starts.tolist(), lengths.tolist(), strict=True):
            payload = data[start : start + length]
            if len(payload) != length:
                raise CorruptDataError(f"The record at byte {start} lies outside the store.")
            row[:] = payload if length == self.record_bytes else self._decode_record(payload)

    @abstractmethod
    def _encode_record(self, record: Bytes) -> bytes | Bytes:
        """One record as bytes, of any length."""

    @abstractmethod
    def _decode_record(self, payload: Bytes) -> Bytes:
        """The ``record_bytes`` bytes that ``payload`` was made from."""
