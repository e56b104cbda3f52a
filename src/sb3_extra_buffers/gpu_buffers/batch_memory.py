"""Memory on a device for batches.

Making a tensor there takes the host as long as starting a kernel, and a batch has five of them. So memory for small
ones is taken for several batches at a time, and cut into tensors in one go.
"""

from __future__ import annotations

import functools
import math

import torch as th

_BATCHES = 16
_BYTES = 1 << 22
"""Not more at a time: someone may keep one of the tensors, and with it the memory of all."""


@functools.lru_cache(maxsize=32)
def _spare(device: th.device, stream: int, shape: tuple[int, ...], dtype: th.dtype) -> list[th.Tensor]:
    """Tensors that nobody has. They serve one stream, since torch hands memory on in the order of one."""
    return []


def empty(shape: tuple[int, ...], dtype: th.dtype, device: th.device) -> th.Tensor:
    """An uninitialised tensor on ``device``."""
    n = min(_BATCHES, _BYTES // max(math.prod(shape) * dtype.itemsize, 1))
    # A tensor that was made in inference mode is of no use outside it.
    if device.type != "cuda" or n < 2 or th.is_inference_mode_enabled():
        return th.empty(shape, dtype=dtype, device=device)
    spare = _spare(device, th._C._cuda_getCurrentRawStream(device.index), shape, dtype)
    try:
        return spare.pop()
    except IndexError:
        first, *others = th.empty((n, *shape), dtype=dtype, device=device).unbind(0)
        spare.extend(others)
        return first
