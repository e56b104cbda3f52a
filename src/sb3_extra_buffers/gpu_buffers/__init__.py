"""Buffers that keep compressed observations on a torch device: CUDA, MPS or the CPU."""

from __future__ import annotations

from sb3_extra_buffers.codecs.availability import has_zstd
from sb3_extra_buffers.compatibility import serve_old_names
from sb3_extra_buffers.compatibility.device import COMPRESSION_METHOD_MAP, find_gpu_buffer_dtypes
from sb3_extra_buffers.gpu_buffers.base import BaseGpuBuffer
from sb3_extra_buffers.gpu_buffers.replay_buffer import GpuDictReplayBuffer, GpuReplayBuffer
from sb3_extra_buffers.gpu_buffers.rollout_buffer import GpuDictRolloutBuffer, GpuRolloutBuffer
from sb3_extra_buffers.gpu_buffers.sequence_buffer import (
    GpuDictPrioritizedSequenceReplayBuffer,
    GpuDictSequenceReplayBuffer,
    GpuPrioritizedSequenceReplayBuffer,
    GpuSequenceReplayBuffer,
)

__all__ = [
    "COMPRESSION_METHOD_MAP",
    "BaseGpuBuffer",
    "GpuDictPrioritizedSequenceReplayBuffer",
    "GpuDictReplayBuffer",
    "GpuDictRolloutBuffer",
    "GpuDictSequenceReplayBuffer",
    "GpuPrioritizedSequenceReplayBuffer",
    "GpuReplayBuffer",
    "GpuRolloutBuffer",
    "GpuSequenceReplayBuffer",
    "find_gpu_buffer_dtypes",
    "has_zstd",
]

serve_old_names(__name__)
