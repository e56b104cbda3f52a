"""dtypes and sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.compressed.compatibility import find_buffer_dtypes
from sb3_extra_buffers.gpu_buffers.size_estimation import estimate_max_slot_bytes, estimate_total_heap_bytes
from sb3_extra_buffers.gpu_buffers.transfer import torch_dtype as numpy_dtype_to_torch

__all__ = [
    "estimate_max_slot_bytes",
    "estimate_total_heap_bytes",
    "find_gpu_buffer_dtypes",
    "numpy_dtype_to_torch",
    "torch_dtype_to_numpy",
]


def torch_dtype_to_numpy(dtype: th.dtype) -> np.dtype[Any]:
    """The NumPy dtype with the same bits."""
    return th.empty(0, dtype=dtype).numpy().dtype


def find_gpu_buffer_dtypes(
    obs_shape: int | Iterable[int], elem_dtype: th.dtype | npt.DTypeLike = th.uint8, compression_method: str = "auto"
) -> dict[str, th.dtype]:
    """The ``dtypes`` argument of a buffer for observations of ``obs_shape`` and ``elem_dtype``, as torch dtypes."""
    found = find_buffer_dtypes(obs_shape, as_numpy_dtype(elem_dtype), compression_method)
    return {name: numpy_dtype_to_torch(dtype) for name, dtype in found.items()}


def as_numpy_dtypes(
    dtypes: Mapping[str, Any] | npt.DTypeLike | th.dtype | None,
) -> dict[str, Any] | npt.DTypeLike | None:
    """The ``dtypes`` argument of a buffer with torch's dtypes replaced by NumPy's."""
    if isinstance(dtypes, Mapping):
        return {name: as_numpy_dtype(dtype) for name, dtype in dtypes.items()}
    dtype: npt.DTypeLike | None = as_numpy_dtype(dtypes)
    return dtype


def as_numpy_dtype(dtype: Any) -> Any:
    """A torch dtype as NumPy's; anything else as it is."""
    return torch_dtype_to_numpy(dtype) if isinstance(dtype, th.dtype) else dtype
