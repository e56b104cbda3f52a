"""Host memory to the device without waiting for it.

Bytes for a GPU pass through pinned memory. Torch's allocator for such memory notes which copies still read from a block
and hands it out again only after them, so nothing here has to wait or to keep count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

CPU = th.device("cpu")


def staged(array: npt.NDArray[Any], device: th.device) -> th.Tensor:
    """A copy of ``array`` on the host, from where it can go to ``device`` in the background."""
    tensor = th.empty(array.shape, dtype=_DTYPES[array.dtype.str[1:]], pin_memory=device.type == "cuda")
    tensor.numpy()[...] = array
    return tensor


def upload(array: npt.NDArray[Any], device: th.device) -> th.Tensor:
    """``array`` as a new tensor on ``device``."""
    return staged(array, device).to(device, non_blocking=True)


def copy_into(target: th.Tensor, array: npt.NDArray[Any]) -> None:
    """Overwrite a tensor on any device."""
    target.copy_(staged(array, target.device), non_blocking=True)


_DTYPES = {
    "u1": th.uint8,
    "b1": th.bool,
    "i1": th.int8,
    "i2": th.int16,
    "i4": th.int32,
    "i8": th.int64,
    "f2": th.float16,
    "f4": th.float32,
    "f8": th.float64,
    "u2": th.uint16,
    "u4": th.uint32,
    "u8": th.uint64,
}


def torch_dtype(dtype: npt.DTypeLike) -> th.dtype:
    """The torch dtype with the same bits."""
    return _DTYPES[np.dtype(dtype).str[1:]]
