"""Choosing dtypes for observations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.compressed.jit import init_jit

_UNSIGNED = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.uint64))
_SIGNED = (np.dtype(np.int8), np.dtype(np.int16), np.dtype(np.int32), np.dtype(np.int64))


def find_smallest_dtype(max_val: float, signed: bool = False, fallback: npt.DTypeLike = np.float32) -> np.dtype[Any]:
    """The smallest integer dtype that holds ``max_val``, or ``fallback`` where none does.

    A negative ``max_val`` needs a signed dtype and gets one. A number with a fraction fits into no integer dtype.
    """
    if math.isfinite(max_val) and max_val == int(max_val):
        value = int(max_val)
        for dtype in _SIGNED if signed or value < 0 else _UNSIGNED:
            limits = np.iinfo(dtype)
            if limits.min <= value <= limits.max:
                return dtype
    return np.dtype(fallback)


def find_buffer_dtypes(
    obs_shape: int | Iterable[int], elem_dtype: npt.DTypeLike = np.uint8, compression_method: str = "auto"
) -> dict[str, np.dtype[Any]]:
    """The ``dtypes`` argument of a compressed buffer for observations of ``obs_shape`` and ``elem_dtype``.

    ``runs_type`` is wide enough for a run as long as a whole observation. For a ``-jit`` method, the code for these
    dtypes is compiled as well, which should happen before worker processes are forked.
    """
    shape = obs_shape if isinstance(obs_shape, Iterable) else (obs_shape,)
    elem_type = np.dtype(elem_dtype)
    runs_type = find_smallest_dtype(math.prod(int(length) for length in shape))
    if parse_method(compression_method).name.endswith("-jit"):
        init_jit(elem_type, runs_type)
    return {"elem_type": elem_type, "runs_type": runs_type}
