"""``gzip``: zlib's deflate, from the standard library."""

from __future__ import annotations

import zlib

from sb3_extra_buffers.codecs.base import Bytes, FrameSpec, RecordCodec

_RAW_DEFLATE = -zlib.MAX_WBITS  # no header and no checksum, which would cost 18 bytes a record


class GzipCodec(RecordCodec):
    """Deflate at the levels 0 (not compressed) to 9 (smallest)."""

    name = "gzip"
    levels = range(10)
    errors = (zlib.error,)
    compresslevel: int

    def __init__(self, frame: FrameSpec, *, compresslevel: int = 9) -> None:
        super().__init__(frame, compresslevel)

    def _encode_record(self, record: Bytes) -> bytes:
        # zlib.compress takes no window size before Python 3.11.
        compressor = zlib.compressobj(self.compresslevel, zlib.DEFLATED, _RAW_DEFLATE)
        return compressor.compress(record.data) + compressor.flush()

    def _decode_record(self, payload: memoryview) -> bytes:
        return zlib.decompress(payload, _RAW_DEFLATE, self.record_bytes)
