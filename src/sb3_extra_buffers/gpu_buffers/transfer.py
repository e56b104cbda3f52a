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


def pinned(shape: tuple[int, ...], dtype: th.dtype, device: th.device) -> th.Tensor:
    """Uninitialised host memory from which :func:`to_device` copies in the background."""
    return th.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(tensor: th.Tensor, device: th.device) -> th.Tensor:
    """A tensor on the host as one on ``device``. A GPU is not waited for."""
    # Other devices would read host memory that was freed in the meantime.
    return tensor.to(device, non_blocking=device.type == "cuda")


def upload(array: npt.NDArray[Any], device: th.device) -> th.Tensor:
    """``array`` as a new tensor on ``device``."""
    return to_device(_staged(array, device), device)


def copy_into(target: th.Tensor, array: npt.NDArray[Any]) -> None:
    """Overwrite a tensor on any device."""
    target.copy_(_staged(array, target.device), non_blocking=target.device.type == "cuda")


def _staged(array: npt.NDArray[Any], device: th.device) -> th.Tensor:
    tensor = pinned(array.shape, torch_dtype(array.dtype), device)
    tensor.numpy()[...] = array
    return tensor


class Report:
    """A tensor on its way to the host."""

    def __init__(self, tensor: th.Tensor) -> None:
        self._copy = pinned(tuple(tensor.shape), tensor.dtype, tensor.device)
        on_gpu = tensor.device.type == "cuda"
        self._copy.copy_(tensor, non_blocking=on_gpu)
        self._arrived = th.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record(th.cuda.current_stream(tensor.device))

    @property
    def has_arrived(self) -> bool:
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def wait(self) -> npt.NDArray[Any]:
        """What the tensor holds."""
        if self._arrived is not None:
            self._arrived.synchronize()
        array: npt.NDArray[Any] = self._copy.numpy()
        return array
