"""Experience from several processes or machines: collectors, segments, and a learner that samples locally."""

from __future__ import annotations

from sb3_extra_buffers.distributed.algorithm import ape_x, distributed
from sb3_extra_buffers.distributed.buffer import ShardedReplayBuffer

__all__ = ["ShardedReplayBuffer", "ape_x", "distributed"]
