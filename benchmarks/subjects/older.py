"""sb3-extra-buffers 0.5.0 from PyPI. Its import name is that of this library, so it has an environment of its own."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

if not version("sb3-extra-buffers").startswith("0.5."):
    raise ImportError(f"sb3-extra-buffers {version('sb3-extra-buffers')} is installed here, not 0.5")

from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer

from benchmarks.subjects.sb3 import Sb3Like
from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer, find_buffer_dtypes


class Older(Sb3Like):
    distribution = "sb3-extra-buffers"

    def replay_buffer(self) -> ReplayBuffer:
        return CompressedReplayBuffer(**self.spaces_and_size, compression_method=self.method, dtypes=self.dtypes)

    def rollout_buffer(self, steps: int) -> RolloutBuffer:
        return CompressedRolloutBuffer(
            **self.spaces_and_size | {"buffer_size": steps}, compression_method=self.method, dtypes=self.dtypes
        )

    @property
    def dtypes(self) -> dict[str, Any]:
        space = self.task.observation_space
        return find_buffer_dtypes(space.shape, space.dtype.type, self.method)
