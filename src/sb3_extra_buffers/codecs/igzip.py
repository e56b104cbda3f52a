"""``igzip``: deflate from Intel's ISA-L, many times faster than zlib's."""

from __future__ import annotations

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.codecs.base import Bytes, FrameSpec, RecordCodec


class IgzipCodec(RecordCodec):
    """Deflate at the levels 0 (fastest) to 3 (smallest), without header and checksum."""

    name = "igzip"
    levels = range(4)

    def __init__(self, frame: FrameSpec, *, compresslevel: int = 2) -> None:
        super().__init__(frame, compresslevel)
        self._library = require("isal.igzip_lib", "The compression method 'igzip'", "isal")
        self.errors = (self._library.IsalError, EOFError)

    def _encode_record(self, record: Bytes) -> bytes:
        library = self._library
        compressed: bytes = library.compress(record, self.compresslevel, library.COMP_DEFLATE)
        return compressed

    def _decode_record(self, payload: memoryview) -> bytes:
        library = self._library
        decompressed: bytes = library.decompress(
            payload, library.DECOMP_DEFLATE, library.MAX_HIST_BITS, self.record_bytes
        )
        return decompressed
