"""Log the memory of a buffer during training."""

from __future__ import annotations

from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

from sb3_extra_buffers.storage.usage import array_bytes


class BufferStatsCallback(BaseCallback):
    """Adds the memory of the model's replay or rollout buffer to what SB3 logs:

    ===============================  ================================================================
    ``buffer/bytes``                 memory of the buffer for what it holds now
    ``buffer/bytes_per_transition``  only of compressed buffers
    ``buffer/ratio``                 how many times smaller than SB3's buffer the compressed one is
    ===============================  ================================================================
    """

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        buffer: Any = getattr(self.model, "replay_buffer", None)
        if buffer is None:
            buffer = getattr(self.model, "rollout_buffer", None)
        if hasattr(buffer, "memory_usage"):
            usage = buffer.memory_usage()
            self.logger.record("buffer/bytes", usage.total)
            self.logger.record("buffer/bytes_per_transition", usage.bytes_per_transition)
            self.logger.record("buffer/ratio", usage.ratio)
        elif buffer is not None:
            self.logger.record("buffer/bytes", array_bytes(buffer))
