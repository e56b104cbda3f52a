"""The contract between the storage layer and a compression method.

A buffer cuts every observation into *frames* of equal size (an observation that is not a stack is one frame). The
frames of one environment, in order of arrival, are its *lane*. ``frames_per_record`` consecutive frames of a lane make
a *record*, the unit that a codec encodes and decodes.

Codecs work on batches of records, never on single ones, because a call from Python costs more than compressing a small
frame. They see frames as plain bytes, so that every dtype survives bit for bit.

Two rules make headers of records unnecessary:

* A record that does not become smaller is stored raw. So a record of exactly ``record_bytes`` bytes is a raw one.
  :class:`RecordCodec` does this for codecs that handle one record at a time.
* A record may need more than its own bytes: a frame or a dictionary, which is called its *reference*. References are
  reference-counted by the codec. The store keeps the number of a record's reference in its index, and passes it to
  :meth:`Codec.release` when it discards the record.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.method import Method
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError
from sb3_extra_buffers.state import SavedState, State

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
RecordFormat = Literal["raw", "delta", "bitpack", "pixel-lz", "zstd", "delta-zstd"]

NO_REFERENCE = 0
"""The reference number of records that need nothing but their own bytes."""
_NO_FRAMES: Words = np.zeros((0, 1), dtype=np.uint32)
_NO_DICTIONARIES: Indices = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class FrameSpec:
    """The format of a frame: ``size`` elements of type ``dtype``."""

    size: int
    dtype: np.dtype[Any]
    channels: int = 1
    """Number of values per pixel."""
    channels_last: bool = False
    """Whether the values of a pixel are next to each other; otherwise, each channel is a plane."""
    row_bytes: int = 0
    """Bytes from one row of an image to the next; 0 if unknown."""

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class Encoded(NamedTuple):
    """Encoded records, back to back in ``data``. Record ``i`` has ``lengths[i]`` bytes and needs ``references[i]``."""

    data: Bytes
    lengths: Indices
    references: Indices


class Codec(ABC):
    """One compression method, configured for frames of one format.

    Subclasses take ``(frame, *, option=default, ...)``. The registry creates them, and checks the options.
    """

    name: ClassVar[str]
    """The method's name without a level, as users write it."""
    levels: ClassVar[range | tuple[int, ...]] = ()
    """Compression levels that the method accepts; empty where it has none."""

    record_format: ClassVar[RecordFormat | None] = None
    """The format of records that :mod:`sb3_extra_buffers.storage.compiled_gathering` can read; otherwise ``None``."""

    frames_per_record: int = 1
    default_frames_per_record: ClassVar[int | None] = None
    """The default of the option ``frames_per_record``; ``None`` if users cannot choose it."""
    compresslevel: int | None = None
    """The compression level; ``None`` if the method has none."""

    encodes_together: ClassVar[bool] = True
    """Whether encoding several records in one call takes much less time than one call per record."""

    distances: Indices = np.zeros(0, dtype=np.int64)
    """With the format ``"delta"``: how many bytes before its target each source of matches lies; see :mod:`.delta`."""

    predictors: Indices = np.zeros((0, 4), dtype=np.int64)
    """With the format ``"bitpack"``: the predictors of blocks; see :func:`.default_predictors`."""

    planes: int = 0
    """With the format ``"pixel-lz"``: 3 for RGB images, whose three planes are decoded together, otherwise 1."""

    def __init__(self, frame: FrameSpec) -> None:
        self.frame = frame

    def free_encoder(self) -> None:  # noqa: B027  # most have nothing to free
        """Free memory that only :meth:`encode` needs: few or no records will be encoded from now on."""

    @property
    def record_bytes(self) -> int:
        """Size of a raw record in bytes."""
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
        """The method as a user would write it, and ``frames_per_record`` unless that is the default."""
        method = str(Method(self.name, self.compresslevel))
        is_default = self.default_frames_per_record in (None, self.frames_per_record)
        return method if is_default else f"{method} x{self.frames_per_record}"

    @property
    def reference_bytes(self) -> int:
        """Bytes of memory that references take now."""
        return 0

    @property
    def reference_frames(self) -> Words:
        """The reference frames, one per row, by reference number; empty for codecs that have none."""
        return _NO_FRAMES

    @property
    def dictionary_addresses(self) -> Indices:
        """The addresses of libzstd's dictionaries by reference number, 0 for none; see :mod:`.libzstd`."""
        return _NO_DICTIONARIES

    @abstractmethod
    def encode(self, records: Bytes, lanes: Indices) -> Encoded:
        """Compress ``records``, an ``(n, record_bytes)`` array whose row ``i`` belongs to lane ``lanes[i]``."""

    @abstractmethod
    def decode(self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes) -> None:
        """Decode records into the rows of ``out``, an ``(n, record_bytes)`` array.

        Record ``i`` lies at ``data[starts[i] : starts[i] + lengths[i]]``. Bytes that do not form a record raise
        :class:`~sb3_extra_buffers.errors.CorruptDataError`. Several threads may call this method at the same time.
        """

    def release(self, references: Indices) -> None:  # noqa: B027  # most codecs have no references
        """Decrease the counts of these references, because their records leave the store."""

    def count_uses(self, references: Indices) -> bool:
        """Set all reference counts, given the references of all records; false if one of them does not exist.

        The store calls this after loading records, and after an exception between encoding records and storing them.
        """
        return not references.any()

    def check(self, references: Indices) -> None:
        """Raise :class:`~sb3_extra_buffers.errors.CorruptDataError` unless the reference counts are right.

        :param references: The references of all records.
        """
        if references.any():
            raise CorruptDataError(f"A record of the method {self.label!r}, which has no references, names one.")

    has_portable_records: bool = True
    """Whether any codec that was made with the same arguments can read the records, given their references."""

    def shared_state(self) -> State:
        """Return what all records depend on, apart from their references, for :meth:`accepts` of another codec."""
        return {}

    def accepts(self, state: SavedState) -> bool:
        """Whether this codec can decode the records of another one, given its :meth:`shared_state`.

        If so, it prepares itself, and can decode them from now on.
        """
        return True

    def reference_content(self, reference: int) -> Bytes:
        """Return a reference as bytes, for :meth:`import_reference` of another codec."""
        raise CorruptDataError(f"Records of the method {self.label!r} have no references.")

    def import_reference(self, content: Bytes) -> int:
        """Add a reference of another codec, and return its number here. Its reference count is 1."""
        raise CorruptDataError(f"Records of the method {self.label!r} have no references.")

    def incref(self, references: Indices) -> None:  # noqa: B027  # most codecs have no references
        """Increase the counts of these references, because their records enter the store."""

    def state(self) -> State:
        """Return what the codec has learnt from frames, for :meth:`restore`."""
        return {}

    def restored(self, state: SavedState) -> Codec:
        """Restore ``state``, and return the codec to use: this one, or one for records of an earlier version."""
        self.restore(state)
        return self

    def restore(self, state: SavedState) -> None:  # noqa: B027  # most codecs learn nothing
        """Take over what :meth:`state` of a codec with the same arguments returned.

        Reference counts are not part of the state: the store calls :meth:`count_uses` afterwards.
        """


def payloads(data: Bytes, starts: Indices, lengths: Indices) -> Iterator[tuple[int, memoryview]]:
    """The start and the bytes of each record."""
    # Slicing memoryviews instead of arrays saves more than a microsecond per record, a fifth of the time for zstd.
    source = data.data
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        payload = source[start : start + length]
        if start < 0 or len(payload) != length:
            raise CorruptDataError(f"The record at byte {start} lies outside the store.")
        yield start, payload


def checked_frames_per_record(given: int, most: int = 1024) -> int:
    """Return ``given``, or raise an error if it is no integer or out of range."""
    try:
        number = int(operator.index(given))
    except TypeError:
        number = 0
    if not 1 <= number <= most:
        raise ConfigurationError(f"frames_per_record must be an integer from 1 to {most}, not {given!r}.")
    return number


class RecordCodec(Codec):
    """A codec that encodes and decodes one record at a time, in most cases with a compression library."""

    errors: tuple[type[Exception], ...] = ()
    """The exceptions that :meth:`_decode_record` raises for corrupt bytes, in addition to ``ValueError``."""

    def __init__(self, frame: FrameSpec, compresslevel: int | None = None) -> None:
        super().__init__(frame)
        self.compresslevel = compresslevel

    def encode(self, records: Bytes, lanes: Indices) -> Encoded:
        encoded = [self._encode_record(record) for record in records]
        kept = [
            data if len(data) < self.record_bytes else record for data, record in zip(encoded, records, strict=True)
        ]
        lengths = np.fromiter(map(len, kept), dtype=np.int64, count=len(kept))
        data = np.frombuffer(b"".join(map(memoryview, kept)), dtype=np.uint8)
        return Encoded(data, lengths, np.full(len(kept), NO_REFERENCE))

    def decode(self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes) -> None:
        self._decode_with(self._decode_record, data, starts, lengths, out)

    def _decode_with(
        self, decode_record: Callable[[memoryview], Any], data: Bytes, starts: Indices, lengths: Indices, out: Bytes
    ) -> None:
        errors: tuple[type[Exception], ...] = (ValueError, *self.errors)
        for row, (start, payload) in zip(out, payloads(data, starts, lengths), strict=True):
            try:
                # If the result has the wrong length, assigning it to its row raises a ValueError.
                row.data[:] = payload if len(payload) == self.record_bytes else decode_record(payload)
            except errors as error:
                raise CorruptDataError(f"The {self.name} record at byte {start} does not decode: {error}.") from error

    @abstractmethod
    def _encode_record(self, record: Bytes) -> bytes:
        """Compress one record. The result may be longer than the record."""

    @abstractmethod
    def _decode_record(self, payload: memoryview) -> bytes | memoryview:
        """Decompress one record to ``record_bytes`` bytes."""
