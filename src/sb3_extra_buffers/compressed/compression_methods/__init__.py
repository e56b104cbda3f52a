"""The import path of version 0.5. See :mod:`sb3_extra_buffers.compressed.compatibility`."""

from sb3_extra_buffers.codecs.availability import has_igzip as has_igzip
from sb3_extra_buffers.codecs.availability import has_lz4 as has_lz4
from sb3_extra_buffers.codecs.availability import has_numba as has_numba
from sb3_extra_buffers.codecs.availability import has_zstd as has_zstd
from sb3_extra_buffers.compressed.compatibility import COMPRESSION_METHOD_MAP as COMPRESSION_METHOD_MAP
from sb3_extra_buffers.compressed.compatibility import HAS_IGZIP as HAS_IGZIP
from sb3_extra_buffers.compressed.compatibility import HAS_LZ4 as HAS_LZ4
from sb3_extra_buffers.compressed.compatibility import HAS_NUMBA as HAS_NUMBA
from sb3_extra_buffers.compressed.compatibility import HAS_ZSTD as HAS_ZSTD
from sb3_extra_buffers.compressed.compatibility import CompressionMethod as CompressionMethod
