"""``lz4-block``: LZ4 blocks without any header, the fastest of the general-purpose methods."""

from __future__ import annotations

from typing import Any

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.codecs.base import Bytes, FrameSpec, RecordCodec

_HIGHEST = 12
"""Levels 13 to 16 exist in the frame format only. Here they are accepted, and mean this level."""


class Lz4BlockCodec(RecordCodec):
    """LZ4 blocks: level 0 is LZ4's default mode, 1 to 16 high compression, negative levels trade size for speed.

    Levels below the lowest one would not be faster.
    """

    name = "lz4-block"
    levels = range(-65536, 17)

    def __init__(self, frame: FrameSpec, *, compresslevel: int = 0) -> None:
        super().__init__(frame, compresslevel)
        self._library = require("lz4.block", "The compression method 'lz4-block'", "lz4")
        self.errors = (self._library.LZ4BlockError,)
        self._mode: dict[str, Any] = {"mode": "default"}
        if compresslevel > 0:
            self._mode = {"mode": "high_compression", "compression": min(compresslevel, _HIGHEST)}
        elif compresslevel < 0:
            self._mode = {"mode": "fast", "acceleration": -compresslevel}

    def _encode_record(self, record: Bytes) -> bytes:
        compressed: bytes = self._library.compress(record, store_size=False, **self._mode)
        return compressed

    def _decode_record(self, payload: memoryview) -> bytes:
        decompressed: bytes = self._library.decompress(payload, uncompressed_size=self.record_bytes)
        return decompressed
