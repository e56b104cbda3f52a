"""``zstd``: Zstandard, small and quick to decode."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import numpy as np

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.codecs.base import Bytes, FrameSpec, Indices
from sb3_extra_buffers.codecs.library import LibraryCodec
from sb3_extra_buffers.errors import CorruptDataError

_WORTH_A_BATCH = 8
"""Records from which one call of the library for all of them is faster than a call for each."""


class ZstdCodec(LibraryCodec):
    """Zstandard with 1 to 22, or -1 to -100 for less compression and more speed.

    The store spreads a batch over the cores; ``threads`` more than 1 lets the library use as many for each part of it.
    """

    name = "zstd"
    levels = (*range(-100, 0), *range(1, 23))
    not_pickled: ClassVar[tuple[str, ...]] = ("_library", "_contexts")

    def __init__(self, frame: FrameSpec, *, compresslevel: int = -3, threads: int = 1) -> None:
        self.threads = threads
        super().__init__(frame, compresslevel)

    def _connect(self) -> None:
        self._library = require("zstandard", "The compression method 'zstd'", "zstd")
        # The library's objects must not be used by two threads at once, and buffers may well be.
        self._contexts = threading.local()

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        # A corrupt header may announce a size that cannot be allocated.
        return (self._library.ZstdError, MemoryError, OverflowError)

    @property
    def _compressor(self) -> Any:
        try:
            return self._contexts.compressor
        except AttributeError:
            # The size of a record is known and a checksum not wanted, so neither takes space in the record.
            self._contexts.compressor = self._library.ZstdCompressor(
                self.compresslevel, write_content_size=False, write_checksum=False
            )
            return self._contexts.compressor

    @property
    def _decompressor(self) -> Any:
        try:
            return self._contexts.decompressor
        except AttributeError:
            self._contexts.decompressor = self._library.ZstdDecompressor()
            return self._contexts.decompressor

    def _encode_record(self, record: Bytes) -> bytes:
        compressed: bytes = self._compressor.compress(record)
        return compressed

    def _decompress(self, payload: memoryview) -> bytes:
        decompressed: bytes = self._decompressor.decompress(payload, self.record_bytes)
        return decompressed

    def decode(self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes) -> None:
        self._decode_with(self._decompressor, data, starts, lengths, out)

    def _decode_with(self, decompressor: Any, data: Bytes, starts: Indices, lengths: Indices, out: Bytes) -> None:
        compressed = np.flatnonzero(lengths != self.record_bytes)
        raw = np.flatnonzero(lengths == self.record_bytes)
        at_once = "multi_decompress_to_buffer" in self._library.backend_features and len(compressed) >= _WORTH_A_BATCH
        errors: tuple[type[Exception], ...] = (ValueError, *self._errors)
        try:
            if at_once:
                segments = np.stack([starts[compressed], lengths[compressed]], axis=1).astype(np.uint64)
                sizes = np.full(len(compressed), self.record_bytes, dtype=np.uint64)
                decoded = decompressor.multi_decompress_to_buffer(
                    self._library.BufferWithSegments(data, segments), decompressed_sizes=sizes, threads=self.threads
                )
            else:
                payloads = zip(starts[compressed].tolist(), lengths[compressed].tolist(), strict=True)
                decoded = (
                    decompressor.decompress(data[start : start + length], self.record_bytes)
                    for start, length in payloads
                )
            for row, record in zip(compressed.tolist(), decoded, strict=True):
                out[row].data[:] = record
            for row, start in zip(raw.tolist(), starts[raw].tolist(), strict=True):
                out[row] = data[start : start + self.record_bytes]
        except errors as error:
            raise CorruptDataError(f"A batch of {self.name} records does not decode: {error}.") from error
