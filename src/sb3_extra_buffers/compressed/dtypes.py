"""Functions of version 0.5 that choose dtypes and compile kernels. The buffers work without them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import FrameSpec
from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.codecs.rle_jit import RleJitCodec
from sb3_extra_buffers.compiled import has_numba
from sb3_extra_buffers.errors import MissingPackageError


def find_smallest_dtype(max_val: float, signed: bool = False, fallback: npt.DTypeLike = np.float32) -> np.dtype[Any]:
    """The smallest integer dtype that holds ``max_val``, or ``fallback`` if none does.

    A negative ``max_val`` needs a signed dtype and gets one. A number with a fraction fits into no integer dtype.
    """
    if math.isfinite(max_val) and max_val == int(max_val):
        value = int(max_val)
        dtype = np.min_scalar_type(-value - 1 if signed and value >= 0 else value)
        if dtype.kind in "iu":
            return dtype
    return np.dtype(fallback)


def find_buffer_dtypes(
    obs_shape: int | Iterable[int], elem_dtype: npt.DTypeLike = np.uint8, compression_method: str = "auto"
) -> dict[str, np.dtype[Any]]:
    """The ``dtypes`` argument of a compressed buffer for observations of ``obs_shape`` and ``elem_dtype``.

    ``runs_type`` is wide enough for a run as long as a whole observation. For a ``-jit`` method, this also compiles the
    kernels for these dtypes: call it before you fork worker processes.
    """
    shape = obs_shape if isinstance(obs_shape, Iterable) else (obs_shape,)
    elem_type = np.dtype(elem_dtype)
    runs_type = find_smallest_dtype(math.prod(int(length) for length in shape))
    if parse_method(compression_method).name.endswith("-jit"):
        init_jit(elem_type, runs_type)
    return {"elem_type": elem_type, "runs_type": runs_type}


def init_jit(elem_type: npt.DTypeLike = np.uint8, runs_type: npt.DTypeLike = np.uint16) -> None:
    """Compile the kernels for observations of ``elem_type`` with runs of ``runs_type`` now.

    Call it before worker processes are forked, so that not all of them compile. Kernels are cached on disk.
    """
    if not has_numba():
        raise MissingPackageError("init_jit", "numba", "numba")
    RleJitCodec(FrameSpec(size=1, dtype=np.dtype(elem_type)), runs_type=runs_type)
