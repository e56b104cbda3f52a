"""What ``bitpack`` and ``pixel-lz`` share: every frame is decoded on its own, straight to its final place.

A record consists of the size of each frame (``uint32``, little-endian), the encoded frames, and some zeros, so that
decoders may read whole vectors.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from sb3_extra_buffers.codecs.base import (
    NO_REFERENCE,
    Bytes,
    Codec,
    Encoded,
    FrameSpec,
    Indices,
    checked_frames_per_record,
    payloads,
)
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.errors import CorruptDataError

_KERNELS = "sb3_extra_buffers.codecs.packed_frames_kernels"


class PackedFramesCodec(Codec):
    """Base class for codecs that define how a single frame is encoded."""

    default_frames_per_record = 4
    padding: ClassVar[int]
    """Number of zeros after the last frame of a record."""

    def __init__(self, frame: FrameSpec, frames_per_record: int) -> None:
        super().__init__(frame)
        self.frames_per_record = checked_frames_per_record(frames_per_record)

    @property
    @abstractmethod
    def _min_frame_bytes(self) -> int:
        """The fewest bytes that a frame can take."""

    @property
    @abstractmethod
    def _max_frame_bytes(self) -> int:
        """The most bytes that a frame can take, which may be more than a raw frame takes."""

    @abstractmethod
    def _pack_frame(self, frame: Bytes) -> bytes:
        """Encode a frame without numba."""

    @abstractmethod
    def _unpack_frame(self, body: Bytes) -> Bytes:
        """Decode a frame without numba. This method defines the format."""

    @property
    def min_encoded_size(self) -> int:
        return min(self.frames_per_record * (4 + self._min_frame_bytes) + self.padding, self.record_bytes)

    def encode(self, records: Bytes, lanes: Indices) -> Encoded:
        kernels = load_kernels(_KERNELS)
        frames = records.reshape(-1, self.frames_per_record, self.frame.nbytes)
        if kernels is None:
            encoded = [self._encode_record(record) for record in frames]
            data = np.frombuffer(b"".join(encoded), dtype=np.uint8)
            lengths = np.array([len(record) for record in encoded], dtype=np.int64)
        else:
            # The kernel may write more than a raw record, before it finds that raw is smaller.
            room = self.frames_per_record * (4 + self._max_frame_bytes - self.frame.nbytes) + 2 * self.padding
            out = np.empty(records.size + room, dtype=np.uint8)
            lengths = np.empty(len(records), dtype=np.int64)
            size = kernels.encode(frames, self.predictors, self.planes, self.frame.row_bytes, out, lengths)
            data = out[:size]
        return Encoded(data, lengths, np.full(len(records), NO_REFERENCE))

    def decode(self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes) -> None:
        kernels = load_kernels(_KERNELS)
        frames = out.reshape(-1, self.frames_per_record, self.frame.nbytes)
        if kernels is not None:
            done = kernels.decode(data, starts, lengths, frames, self.predictors, self.planes)
            if done < len(starts):
                raise CorruptDataError(f"The {self.name} record at byte {starts[done]} does not decode.")
            return
        for row, (_, payload) in zip(frames, payloads(data, starts, lengths), strict=True):
            record = np.asarray(payload)
            row[:] = record.reshape(row.shape) if len(record) == row.size else self._decode_record(record)

    def _encode_record(self, record: Bytes) -> bytes:
        frames = [self._pack_frame(frame) for frame in record]
        sizes = np.array([len(frame) for frame in frames], dtype="<u4")
        payload = sizes.tobytes() + b"".join(frames) + bytes(self.padding)
        return payload if len(payload) < record.size else record.tobytes()

    def _decode_record(self, payload: Bytes) -> Bytes:
        begin = 4 * self.frames_per_record
        sizes = payload[:begin].tobytes()
        ends = begin + np.cumsum(np.frombuffer(sizes[: len(sizes) // 4 * 4], dtype="<u4"), dtype=np.int64)
        if len(ends) != self.frames_per_record or ends[-1] + self.padding != len(payload):
            raise CorruptDataError(f"A {self.name} record of {len(payload)} bytes does not agree with its sizes.")
        first, *others = np.split(payload, ends)[:-1]
        return np.stack([self._unpack_frame(body) for body in (first[begin:], *others)])
