"""Host memory to the device without waiting for it.

Bytes for a GPU pass through pinned memory. Torch's allocator for such memory notes which copies still read from a block
and hands it out again only after them, so nothing here has to wait or to keep count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.gpu_buffers import kernels

CPU = th.device("cpu")


def staged(array: npt.NDArray[Any], device: th.device) -> th.Tensor:
    """A copy of ``array`` on the host, from where it can go to ``device`` in the background."""
    tensor = th.empty(array.shape, dtype=_DTYPES[array.dtype.str[1:]], pin_memory=device.type == "cuda")
    tensor.numpy()[...] = array
    return tensor


def to_device(tensor: th.Tensor, device: th.device) -> th.Tensor:
    """A tensor on the host as one on ``device``. A GPU is not waited for."""
    # Nor does CUDA read what was freed in the meantime, as other devices would.
    return tensor.to(device, non_blocking=device.type == "cuda")


def upload(array: npt.NDArray[Any], device: th.device) -> th.Tensor:
    """``array`` as a new tensor on ``device``."""
    return to_device(staged(array, device), device)


def copy_into(target: th.Tensor, array: npt.NDArray[Any]) -> None:
    """Overwrite a tensor on any device."""
    target.copy_(staged(array, target.device), non_blocking=target.device.type == "cuda")


def keep_for(stream: th.cuda.Stream | None, *tensors: th.Tensor) -> None:
    """Tell torch that work on ``stream`` reads these tensors, so that their memory is not given to others before."""
    if stream is not None:
        for tensor in tensors:
            tensor.record_stream(stream)


class Outbox:
    """Changes to tensors on ``device``, which reach it together: with Triton in one transfer and one launch.

    ``with Outbox(device) as outbox:`` sends them at the end. Whatever is queued on the device afterwards sees them.
    Sending may fail, or be interrupted, at any point. So whoever puts something in goes on counting it as not sent
    until it is told, by :meth:`when_sent`, that it was; to send something twice does no harm.
    """

    def __init__(self, device: th.device) -> None:
        self._device = device
        self._by_kernel = kernels.uses_triton(device)
        self._segments: list[npt.NDArray[np.int64]] = []
        """Rows of (address, length)."""
        self._parts: list[npt.NDArray[np.uint8]] = []
        self._when_sent: list[Callable[[], None]] = []

    def when_sent(self, note: Callable[[], None]) -> None:
        """Call ``note`` when everything that has been put in so far is on its way."""
        self._when_sent.append(note)

    def put(self, target: th.Tensor, first: int, values: npt.NDArray[Any]) -> None:
        """Overwrite the rows of ``target``, which must be contiguous, from ``first`` on."""
        if not self._by_kernel:
            copy_into(target[first : first + len(values)], values)
            return
        data = values.reshape(-1).view(np.uint8)
        address = target.data_ptr() + first * (data.size // len(values))
        begins = range(0, data.size, _SEGMENT_BYTES)
        pieces = [(address + begin, min(data.size - begin, _SEGMENT_BYTES)) for begin in begins]
        self._segments.append(np.array(pieces, dtype=np.int64))
        self._parts.append(data)

    def put_rows(self, target: th.Tensor, rows: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
        """Overwrite some rows of ``target``, which must be contiguous."""
        if not self._by_kernel:
            target.index_copy_(0, upload(rows, self._device), upload(values, self._device))
            return
        data = values.reshape(-1).view(np.uint8)
        row_bytes = data.size // len(rows)
        segments = np.empty((len(rows), 2), dtype=np.int64)
        segments[:, 0] = target.data_ptr() + rows * row_bytes
        segments[:, 1] = row_bytes
        self._segments.append(segments)
        self._parts.append(data)

    def __enter__(self) -> Outbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        if self._parts:
            self._send()
        for note in self._when_sent:
            note()

    def _send(self) -> None:
        from sb3_extra_buffers.gpu_buffers.kernels.segments_triton import write_segments

        segments = np.concatenate(self._segments)
        head = 24 * len(segments)
        size = head + sum(part.size for part in self._parts)
        staged = th.empty(size, dtype=th.uint8, pin_memory=self._device.type == "cuda")
        blob = staged.numpy()
        table = blob[:head].view(np.int64).reshape(-1, 3)
        table[:, :2] = segments
        np.cumsum(segments[:, 1], out=table[:, 2])
        table[:, 2] += head - segments[:, 1]
        np.concatenate(self._parts, out=blob[head:])
        write_segments(to_device(staged, self._device), len(segments))


_SEGMENT_BYTES = 1 << 14
"""What one program of the kernel copies at most."""

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
