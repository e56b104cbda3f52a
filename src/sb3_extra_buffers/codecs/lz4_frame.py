"""``lz4-frame``: LZ4 in its frame format."""

from __future__ import annotations

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.codecs.base import Bytes, FrameSpec, RecordCodec
from sb3_extra_buffers.errors import ConfigurationError

_BLOCK_SIZES = (0, 4, 5, 6, 7)  # default, 64 kB, 256 kB, 1 MB, 4 MB: the library's own constants


class Lz4FrameCodec(RecordCodec):
    """LZ4 frames: levels 0 to 2 are fast, 3 to 16 high compression, negative levels trade size for speed.

    Levels below the lowest one would not be faster. ``block_size`` is one of ``lz4.frame``'s constants.
    """

    name = "lz4-frame"
    levels = range(-65536, 17)
    errors = (RuntimeError,)

    def __init__(self, frame: FrameSpec, *, compresslevel: int = 0, block_size: int = 0) -> None:
        if block_size not in _BLOCK_SIZES:
            raise ConfigurationError(f"block_size must be one of {_BLOCK_SIZES}, not {block_size!r}.")
        super().__init__(frame, compresslevel)
        self._library = require("lz4.frame", "The compression method 'lz4-frame'", "lz4")
        self.block_size = int(block_size)

    def _encode_record(self, record: Bytes) -> bytes:
        compressed: bytes = self._library.compress(
            record, compression_level=self.compresslevel, block_size=self.block_size, store_size=False
        )
        return compressed

    def _decode_record(self, payload: memoryview) -> bytes:
        decompressed: bytes = self._library.decompress(payload)
        return decompressed
