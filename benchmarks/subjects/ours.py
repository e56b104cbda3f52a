"""The buffers of this library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer

from benchmarks.subjects.sb3 import Sb3Like
from sb3_extra_buffers.compressed import CompressedDictReplayBuffer, CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.measure.buffers import buffer_arguments
from sb3_extra_buffers.storage.observation_store import ObservationStore


class Ours(Sb3Like):
    """Methods are written as for :func:`buffer_arguments`, optionally followed by ``prefer=memory`` or the like."""

    distribution = "sb3-extra-buffers"

    def replay_buffer(self) -> ReplayBuffer:
        is_dict = isinstance(self.task.observation_space, spaces.Dict)
        kind = CompressedDictReplayBuffer if is_dict else CompressedReplayBuffer
        return kind(**self.spaces_and_size, **self.compression)

    def rollout_buffer(self, steps: int) -> RolloutBuffer:
        return CompressedRolloutBuffer(**self.spaces_and_size | {"buffer_size": steps}, **self.compression)

    @property
    def compression(self) -> dict[str, Any]:
        method, is_given, preference = self.method.partition(" prefer=")
        return buffer_arguments(method) | ({"prefer": preference} if is_given else {})

    def save(self, path: Path) -> None:
        assert isinstance(self.buffer, CompressedReplayBuffer)
        self.buffer.save(path)

    def load(self, path: Path) -> None:
        assert isinstance(self.buffer, CompressedReplayBuffer)
        self.buffer = type(self.buffer).load(path)

    def payload_per_frame(self) -> float | None:
        assert isinstance(self.buffer, CompressedReplayBuffer)
        stores = self.buffer._stores.values()
        # All frames that were ever encoded, including those that have been overwritten since.
        encoded = sum(int(store.frames.encoded.sum()) for store in stores if isinstance(store, ObservationStore))
        return self.buffer.memory_usage().payload / encoded if encoded else None

    def usage(self) -> dict[str, Any]:
        assert isinstance(self.buffer, BaseCompressedBuffer)
        usage = self.buffer.memory_usage()
        return {"method": usage.method, "bytes": usage.bytes_per_transition, "why": usage.choice}
