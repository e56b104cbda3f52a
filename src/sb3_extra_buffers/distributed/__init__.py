"""Distributed training: collectors in several processes or machines send segments to a learner's replay buffer."""

from __future__ import annotations

from sb3_extra_buffers.distributed.algorithm import ape_x, distributed
from sb3_extra_buffers.distributed.buffer import ShardedReplayBuffer

__all__ = ["ShardedReplayBuffer", "ape_x", "distributed"]
