"""Compression methods for single observations, outside any buffer.

>>> import numpy as np
>>> from sb3_extra_buffers.compressed.compression_methods import COMPRESSION_METHOD_MAP
>>> observation = np.zeros((84, 84), dtype=np.uint8)
>>> data = COMPRESSION_METHOD_MAP["gzip"].compress(observation, compresslevel=6)
>>> COMPRESSION_METHOD_MAP["gzip"].decompress(data, arr_configs={"shape": (84, 84)}).shape
(84, 84)
"""

from __future__ import annotations

from sb3_extra_buffers.codecs.availability import has_igzip, has_lz4, has_numba, has_zstd
from sb3_extra_buffers.codecs.registry import ALIASES, METHODS
from sb3_extra_buffers.compressed.compression_methods.single import CompressionMethod

__all__ = [
    "COMPRESSION_METHOD_MAP",
    "HAS_IGZIP",
    "HAS_LZ4",
    "HAS_NUMBA",
    "HAS_ZSTD",
    "CompressionMethod",
    "has_igzip",
    "has_lz4",
    "has_numba",
    "has_zstd",
]

HAS_NUMBA = has_numba()
HAS_IGZIP = has_igzip()
HAS_ZSTD = has_zstd()
HAS_LZ4 = has_lz4()

# Their records lean on frames seen before, which a single observation does not have.
_NEED_OTHER_FRAMES = ("delta", "zstd-dict")

COMPRESSION_METHOD_MAP: dict[str, CompressionMethod] = {
    name: CompressionMethod(ALIASES.get(name, name)) for name in (*METHODS, *ALIASES) if name not in _NEED_OTHER_FRAMES
}
"""Every method that can stand alone. One whose package is missing says so when it is used."""
