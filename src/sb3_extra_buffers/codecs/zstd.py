"""``zstd``: Zstandard, small and quick to decode."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.codecs.base import Bytes, FrameSpec
from sb3_extra_buffers.codecs.library import LibraryCodec


class ZstdCodec(LibraryCodec):
    """Zstandard with 1 to 22, or -1 to -100 for less compression and more speed.

    Records are decoded by a call each: the library's call for many of them allocates fresh memory for all, and the page
    faults of that cost more than the calls.
    """

    name = "zstd"
    levels = (*range(-100, 0), *range(1, 23))
    not_pickled: ClassVar[tuple[str, ...]] = ("_library", "_contexts")

    def __init__(self, frame: FrameSpec, *, compresslevel: int = -3) -> None:
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
