"""Buffers that hold observations compressed on a torch device: CUDA, MPS or the CPU."""

from __future__ import annotations

from sb3_extra_buffers.codecs.availability import has_zstd
from sb3_extra_buffers.gpu_buffers.base import BaseGpuBuffer
from sb3_extra_buffers.gpu_buffers.methods import COMPRESSION_METHOD_MAP
from sb3_extra_buffers.gpu_buffers.replay_buffer import GpuDictReplayBuffer, GpuReplayBuffer
from sb3_extra_buffers.gpu_buffers.rollout_buffer import GpuDictRolloutBuffer, GpuRolloutBuffer
from sb3_extra_buffers.gpu_buffers.utils import find_gpu_buffer_dtypes

__all__ = [
    "COMPRESSION_METHOD_MAP",
    "BaseGpuBuffer",
    "GpuDictReplayBuffer",
    "GpuDictRolloutBuffer",
    "GpuReplayBuffer",
    "GpuRolloutBuffer",
    "find_gpu_buffer_dtypes",
    "has_zstd",
]
