"""``lz4-block``: LZ4 blocks without any header, the fastest of the general-purpose methods."""

from __future__ import annotations

from typing import Any

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.codecs.base import Bytes, FrameSpec
from sb3_extra_buffers.codecs.library import LibraryCodec

_HIGHEST = 12  # what 13 to 16, which are levels of the frame format, mean as well


class Lz4BlockCodec(LibraryCodec):
    """LZ4 blocks: 0 is LZ4's default mode, 1 to 16 high compression, negative levels trade size for speed.

    The lowest level is where LZ4 stops to accelerate.
    """

    name = "lz4-block"
    levels = range(-65536, 17)

    def __init__(self, frame: FrameSpec, *, compresslevel: int = 0) -> None:
        self._mode: dict[str, Any]
        if compresslevel > 0:
            self._mode = {"mode": "high_compression", "compression": min(compresslevel, _HIGHEST)}
        elif compresslevel < 0:
            self._mode = {"mode": "fast", "acceleration": -compresslevel}
        else:
            self._mode = {"mode": "default"}
        super().__init__(frame, compresslevel)

    def _connect(self) -> None:
        self._library = require("lz4.block", "The compression method 'lz4-block'", "lz4")

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        return (self._library.LZ4BlockError,)

    def _encode_record(self, record: Bytes) -> bytes:
        compressed: bytes = self._library.compress(record, store_size=False, **self._mode)
        return compressed

    def _decompress(self, payload: memoryview) -> bytes:
        decompressed: bytes = self._library.decompress(payload, uncompressed_size=self.record_bytes)
        return decompressed
