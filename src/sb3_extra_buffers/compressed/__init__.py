"""Compressed buffers in host memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sb3_extra_buffers.codecs.availability import has_igzip, has_lz4, has_numba, has_zstd
from sb3_extra_buffers.compatibility import serve_old_names
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer, DummyCls
from sb3_extra_buffers.compressed.compressed_array import CompressedArray
from sb3_extra_buffers.compressed.compression_methods import HAS_IGZIP, HAS_LZ4, HAS_NUMBA, HAS_ZSTD
from sb3_extra_buffers.compressed.dtypes import find_buffer_dtypes, find_smallest_dtype, init_jit
from sb3_extra_buffers.compressed.her_buffer import CompressedHerReplayBuffer
from sb3_extra_buffers.compressed.nstep_buffer import CompressedDictNStepReplayBuffer, CompressedNStepReplayBuffer
from sb3_extra_buffers.compressed.prioritized_buffer import (
    CompressedDictPrioritizedReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    PrioritizedReplayBufferSamples,
)
from sb3_extra_buffers.compressed.prioritized_dqn import PrioritizedDQN
from sb3_extra_buffers.compressed.prioritized_sequence_buffer import (
    CompressedDictPrioritizedSequenceReplayBuffer,
    CompressedPrioritizedSequenceReplayBuffer,
    PrioritizedSequenceReplayBufferSamples,
)
from sb3_extra_buffers.compressed.replay_buffer import CompressedDictReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.compressed.rollout_buffer import CompressedDictRolloutBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.compressed.sequence_buffer import (
    CompressedDictSequenceReplayBuffer,
    CompressedSequenceReplayBuffer,
    SequenceReplayBufferSamples,
)

if TYPE_CHECKING:
    from sb3_extra_buffers.compressed.maskable_buffer import (
        CompressedMaskableDictRolloutBuffer as CompressedMaskableDictRolloutBuffer,
    )
    from sb3_extra_buffers.compressed.maskable_buffer import (
        CompressedMaskableRolloutBuffer as CompressedMaskableRolloutBuffer,
    )
    from sb3_extra_buffers.compressed.recurrent_buffer import (
        CompressedRecurrentDictRolloutBuffer as CompressedRecurrentDictRolloutBuffer,
    )
    from sb3_extra_buffers.compressed.recurrent_buffer import CompressedRecurrentPPO as CompressedRecurrentPPO
    from sb3_extra_buffers.compressed.recurrent_buffer import (
        CompressedRecurrentRolloutBuffer as CompressedRecurrentRolloutBuffer,
    )

__all__ = [
    "HAS_IGZIP",
    "HAS_LZ4",
    "HAS_NUMBA",
    "HAS_ZSTD",
    "BaseCompressedBuffer",
    "CompressedArray",
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
    "DummyCls",
    "PrioritizedDQN",
    "PrioritizedReplayBufferSamples",
    "PrioritizedSequenceReplayBufferSamples",
    "SequenceReplayBufferSamples",
    "find_buffer_dtypes",
    "find_smallest_dtype",
    "has_igzip",
    "has_lz4",
    "has_numba",
    "has_zstd",
    "init_jit",
]

# These classes need sb3-contrib. They are imported on first use, and `from ... import *` leaves them out.
_FROM_CONTRIB = {
    "CompressedMaskableDictRolloutBuffer": "maskable_buffer",
    "CompressedMaskableRolloutBuffer": "maskable_buffer",
    "CompressedRecurrentDictRolloutBuffer": "recurrent_buffer",
    "CompressedRecurrentPPO": "recurrent_buffer",
    "CompressedRecurrentRolloutBuffer": "recurrent_buffer",
}
serve_old_names(__name__)


def __dir__() -> list[str]:
    return sorted([*globals(), *_FROM_CONTRIB])


def __getattr__(name: str) -> Any:
    if name not in _FROM_CONTRIB:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FROM_CONTRIB[name]}"), name)
