"""The buffers of this library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer

from benchmarks.subjects.sb3 import Sb3Like
from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.measure.buffers import buffer_arguments
from sb3_extra_buffers.storage.observation_store import ObservationStore


class Ours(Sb3Like):
    """``zstd-dict/9 x8 indexed`` is ``zstd-dict/9`` with 8 frames per record and indexed colour."""

    distribution = "sb3-extra-buffers"

    def replay_buffer(self) -> ReplayBuffer:
        return CompressedReplayBuffer(**self.spaces_and_size, **self.compression)

    def rollout_buffer(self, steps: int) -> RolloutBuffer:
        return CompressedRolloutBuffer(**self.spaces_and_size | {"buffer_size": steps}, **self.compression)

    @property
    def compression(self) -> dict[str, Any]:
        return buffer_arguments(self.method)

    def save(self, path: Path) -> None:
        assert isinstance(self.buffer, CompressedReplayBuffer)
        self.buffer.save(path)

    def load(self, path: Path) -> None:
        self.buffer = CompressedReplayBuffer.load(path)

    def payload_per_frame(self) -> float:
        assert isinstance(self.buffer, CompressedReplayBuffer)
        store = self.buffer._stores[""]
        assert isinstance(store, ObservationStore)
        # Frames that were ever encoded: those that have been overwritten since would count, too.
        return self.buffer.memory_usage().payload / int(store.frames.encoded.sum())
