"""``zstd``: Zstandard, small and quick to decode."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.codecs.base import Bytes, FrameSpec, Indices
from sb3_extra_buffers.codecs.library import LibraryCodec
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.threads import core_count

_WORTH_THREADS = 4 << 20
"""Decoded bytes from which the library's threads, started anew for every call, gain more than they cost."""
_MOST_THREADS = 8


class ZstdCodec(LibraryCodec):
    """Zstandard with 1 to 22, or -1 to -100 for less compression and more speed.

    Large batches are decoded in ``threads`` threads: by default one per core and at most 8; 0 or 1 turns threads off,
    -1 is one per core without that limit.
    """

    name = "zstd"
    levels = (*range(-100, 0), *range(1, 23))
    not_pickled = ("_library", "_contexts")

    def __init__(self, frame: FrameSpec, *, compresslevel: int = -3, threads: int | None = None) -> None:
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
        threads = self._thread_count()
        compressed = np.flatnonzero(lengths != self.record_bytes)
        if threads <= 1 or len(compressed) * self.record_bytes < _WORTH_THREADS:
            super().decode(data, starts, lengths, references, out)
            return
        raw = np.flatnonzero(lengths == self.record_bytes)
        segments = np.stack([starts[compressed], lengths[compressed]], axis=1).astype(np.uint64)
        sizes = np.full(len(compressed), self.record_bytes, dtype=np.uint64)
        errors: tuple[type[Exception], ...] = (ValueError, *self._errors)
        try:
            decoded = self._decompressor.multi_decompress_to_buffer(
                self._library.BufferWithSegments(data, segments), decompressed_sizes=sizes, threads=threads
            )
            for row, record in zip(compressed.tolist(), decoded, strict=True):
                out[row].data[:] = record
            for row, start in zip(raw.tolist(), starts[raw].tolist(), strict=True):
                out[row] = data[start : start + self.record_bytes]
        except errors as error:
            raise CorruptDataError(f"A batch of zstd records does not decode: {error}.") from error

    def _thread_count(self) -> int:
        if "multi_decompress_to_buffer" not in self._library.backend_features:  # the library's variant without C
            return 1
        if self.threads is None:
            return min(core_count(), _MOST_THREADS)
        return core_count() if self.threads < 0 else self.threads
