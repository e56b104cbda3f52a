"""``zstd``: Zstandard, small and quick to decode."""

from __future__ import annotations

import threading
from typing import Any

from sb3_extra_buffers.codecs import libzstd
from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.codecs.base import Bytes, FrameSpec, Indices, RecordCodec
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.errors import CorruptDataError

_KERNELS = "sb3_extra_buffers.codecs.zstd_kernels"


class ZstdCodec(RecordCodec):
    """Zstandard at the levels 1 to 22, or -1 to -100 for less compression and more speed.

    Where libzstd's functions can be called directly, one compiled call decompresses a whole batch. Otherwise, each
    record takes a Python call.
    """

    name = "zstd"
    record_format = "zstd"
    levels = (*range(-100, 0), *range(1, 23))
    compresslevel: int

    def __init__(self, frame: FrameSpec, *, compresslevel: int = -3) -> None:
        super().__init__(frame, compresslevel)
        self._library = require("zstandard", "The compression method 'zstd'", "zstd")
        # A corrupt header may announce a size that cannot be allocated.
        self.errors = (self._library.ZstdError, MemoryError, OverflowError)
        # The library's objects must not be used by two threads at once.
        self._contexts = threading.local()

    def decode(self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes) -> None:
        decompress, kernels = libzstd.decompress_function(), load_kernels(_KERNELS)
        if decompress == 0 or kernels is None:
            self._decode_one_by_one(data, starts, lengths, references, out)
            return
        with libzstd.contexts(1) as contexts:
            done = kernels.decode(
                data, starts, lengths, references, out, decompress, int(contexts[0]), self.dictionary_addresses
            )
        if done < len(starts):
            raise CorruptDataError(f"The {self.name} record at byte {starts[done]} does not decode.")

    def _decode_one_by_one(
        self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes
    ) -> None:
        super().decode(data, starts, lengths, references, out)

    @property
    def _compressor(self) -> Any:
        try:
            return self._contexts.compressor
        except AttributeError:
            # Records contain neither a checksum nor their size, which is known.
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

    def _decode_record(self, payload: memoryview) -> bytes:
        decompressed: bytes = self._decompressor.decompress(payload, self.record_bytes)
        return decompressed
