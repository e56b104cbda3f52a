"""Buffers that hold observations compressed, in host memory."""

from __future__ import annotations

from sb3_extra_buffers.compressed.base import BaseCompressedBuffer, DummyCls
from sb3_extra_buffers.compressed.compressed_array import CompressedArray
from sb3_extra_buffers.compressed.compression_methods import (
    HAS_IGZIP,
    HAS_LZ4,
    HAS_NUMBA,
    HAS_ZSTD,
    has_igzip,
    has_lz4,
    has_numba,
    has_zstd,
)
from sb3_extra_buffers.compressed.dtypes import find_buffer_dtypes, find_smallest_dtype
from sb3_extra_buffers.compressed.jit import init_jit
from sb3_extra_buffers.compressed.replay_buffer import CompressedDictReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.compressed.rollout_buffer import CompressedDictRolloutBuffer, CompressedRolloutBuffer

__all__ = [
    "HAS_IGZIP",
    "HAS_LZ4",
    "HAS_NUMBA",
    "HAS_ZSTD",
    "BaseCompressedBuffer",
    "CompressedArray",
    "CompressedDictReplayBuffer",
    "CompressedDictRolloutBuffer",
    "CompressedReplayBuffer",
    "CompressedRolloutBuffer",
    "DummyCls",
    "find_buffer_dtypes",
    "find_smallest_dtype",
    "has_igzip",
    "has_lz4",
    "has_numba",
    "has_zstd",
    "init_jit",
]
