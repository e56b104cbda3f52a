"""Rollout buffers for sb3-contrib's MaskablePPO."""

from __future__ import annotations

from sb3_extra_buffers.compressed.rollout_buffer import CompressedDictRolloutBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.errors import MissingPackageError

try:
    from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
except ImportError as error:
    raise MissingPackageError("A rollout buffer with action masks", "sb3-contrib", "contrib") from error


class CompressedMaskableRolloutBuffer(CompressedRolloutBuffer, MaskableRolloutBuffer):
    """contrib's ``MaskableRolloutBuffer`` with compressed observations.

    Further arguments: see :class:`~sb3_extra_buffers.compressed.base.BaseCompressedBuffer`.
    """

    _saved_fields = (*CompressedRolloutBuffer._saved_fields, "action_masks")


class CompressedMaskableDictRolloutBuffer(CompressedDictRolloutBuffer, MaskableDictRolloutBuffer):
    """The same for Dict observation spaces, each key stored on its own."""

    _saved_fields = CompressedMaskableRolloutBuffer._saved_fields
