"""Compile now what would otherwise be compiled on first use."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.codecs.base import FrameSpec
from sb3_extra_buffers.codecs.rle_jit import RleJitCodec
from sb3_extra_buffers.errors import MissingPackageError


def init_jit(elem_type: npt.DTypeLike = np.uint8, runs_type: npt.DTypeLike = np.uint16) -> None:
    """Compile the kernels for observations of ``elem_type`` with runs of ``runs_type``.

    Call it before worker processes are forked, so that they need not all compile. What was compiled is kept on disk.
    """
    if not has_numba():
        raise MissingPackageError("init_jit", "numba", "numba")
    RleJitCodec(FrameSpec(size=1, dtype=np.dtype(elem_type)), runs_type=runs_type)
