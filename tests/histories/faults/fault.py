"""What a planted fault is."""

from __future__ import annotations

from typing import NamedTuple

REPLAY, ROLLOUT = ("CompressedReplayBuffer",), ("CompressedRolloutBuffer",)
BOTH = REPLAY + ROLLOUT
MANY = (*BOTH, "CompressedNStepReplayBuffer", "CompressedMaskableRolloutBuffer", "CompressedDictReplayBuffer")
DEVICE = ("GpuReplayBuffer", "GpuRolloutBuffer", "GpuDictReplayBuffer")


class Fault(NamedTuple):
    name: str
    file: str
    """In ``src/sb3_extra_buffers``."""
    old: str
    new: str
    buffers: tuple[str, ...] = MANY
    """Whose histories are searched for it, in this order."""
    kernels: bool = False
    """Whether it is in a kernel of Triton."""
    segments: bool = False
    """Whether histories are searched whose steps arrive in segments."""

    def plant(self, text: str) -> str:
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"The fault {self.name!r} fits {count} places of {self.file} instead of one: {self.old!r}")
        return text.replace(self.old, self.new)
