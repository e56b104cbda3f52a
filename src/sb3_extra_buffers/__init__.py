"""Compressed replay and rollout buffers for Stable-Baselines3. The common classes can be imported from here."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sb3_extra_buffers.compatibility import old_name, serve_old_names

if TYPE_CHECKING:
    from sb3_extra_buffers.compressed import (
        CompressedDictNStepReplayBuffer,
        CompressedDictPrioritizedReplayBuffer,
        CompressedDictPrioritizedSequenceReplayBuffer,
        CompressedDictReplayBuffer,
        CompressedDictRolloutBuffer,
        CompressedDictSequenceReplayBuffer,
        CompressedHerReplayBuffer,
        CompressedNStepReplayBuffer,
        CompressedPrioritizedReplayBuffer,
        CompressedPrioritizedSequenceReplayBuffer,
        CompressedReplayBuffer,
        CompressedRolloutBuffer,
        CompressedSequenceReplayBuffer,
        PrioritizedDQN,
    )
    from sb3_extra_buffers.gpu_buffers import (
        GpuDictPrioritizedSequenceReplayBuffer,
        GpuDictReplayBuffer,
        GpuDictRolloutBuffer,
        GpuDictSequenceReplayBuffer,
        GpuPrioritizedSequenceReplayBuffer,
        GpuReplayBuffer,
        GpuRolloutBuffer,
        GpuSequenceReplayBuffer,
    )

__version__ = "1.0.0rc1"

__all__ = [
    "CompressedDictNStepReplayBuffer",
    "CompressedDictPrioritizedReplayBuffer",
    "CompressedDictPrioritizedSequenceReplayBuffer",
    "CompressedDictReplayBuffer",
    "CompressedDictRolloutBuffer",
    "CompressedDictSequenceReplayBuffer",
    "CompressedHerReplayBuffer",
    "CompressedNStepReplayBuffer",
    "CompressedPrioritizedReplayBuffer",
    "CompressedPrioritizedSequenceReplayBuffer",
    "CompressedReplayBuffer",
    "CompressedRolloutBuffer",
    "CompressedSequenceReplayBuffer",
    "GpuDictPrioritizedSequenceReplayBuffer",
    "GpuDictReplayBuffer",
    "GpuDictRolloutBuffer",
    "GpuDictSequenceReplayBuffer",
    "GpuPrioritizedSequenceReplayBuffer",
    "GpuReplayBuffer",
    "GpuRolloutBuffer",
    "GpuSequenceReplayBuffer",
    "PrioritizedDQN",
]

# Without a handler, Python would print warnings to stderr even if the program has not configured logging.
logging.getLogger(__name__).addHandler(logging.NullHandler())
serve_old_names(__name__)


def __getattr__(name: str) -> Any:
    # Classes are imported on first use: importing torch and SB3 takes seconds.
    if name not in __all__:
        return old_name(__name__, name, stacklevel=3)
    package = "gpu_buffers" if name.startswith("Gpu") else "compressed"
    return getattr(import_module(f"{__name__}.{package}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
