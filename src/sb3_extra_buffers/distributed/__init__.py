"""Distributed training: collectors in other processes or on other machines send their steps to a learner's buffer."""

from __future__ import annotations

from sb3_extra_buffers.distributed.algorithm import ape_x, distributed
from sb3_extra_buffers.distributed.buffer import ShardedReplayBuffer

__all__ = ["ShardedReplayBuffer", "ape_x", "distributed"]
