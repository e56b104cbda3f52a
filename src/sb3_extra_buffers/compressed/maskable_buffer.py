"""Rollout buffers for sb3-contrib's MaskablePPO."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.compressed.rollout_buffer import CompressedDictRolloutBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.compressed.rows import on_host, row_of
from sb3_extra_buffers.errors import MissingPackageError

try:
    from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
except ImportError as error:
    raise MissingPackageError("A rollout buffer with action masks", "sb3-contrib", "contrib") from error


class _Maskable(CompressedRolloutBuffer):
    """Stores action masks. The base of both classes."""

    _saved_fields = (*CompressedRolloutBuffer._saved_fields, "action_masks")
    action_masks: npt.NDArray[np.float32]
    mask_dims: int

    def _extra_rows(self, action_masks: Any = None, **unknown: Any) -> dict[str, npt.NDArray[Any]]:
        rows = super()._extra_rows(**unknown)
        if action_masks is not None:
            masks = np.asarray(on_host(action_masks)).reshape(self.n_envs, self.mask_dims)
            rows["action_masks"] = row_of(self.action_masks, masks)
        return rows


# contrib's add() takes any *args.
class CompressedMaskableRolloutBuffer(_Maskable, MaskableRolloutBuffer):  # type: ignore[misc]
    """contrib's ``MaskableRolloutBuffer`` with compressed observations.

    Further arguments: see :class:`~sb3_extra_buffers.compressed.base.BaseCompressedBuffer`.
    """


class CompressedMaskableDictRolloutBuffer(_Maskable, CompressedDictRolloutBuffer, MaskableDictRolloutBuffer):  # type: ignore[misc]
    """:class:`CompressedMaskableRolloutBuffer` for Dict observation spaces. Each key is stored on its own."""
