"""Bytes that arrived in one piece, put where they belong in one launch."""

from __future__ import annotations

import torch as th
import triton
import triton.language as tl

from sb3_extra_buffers.gpu_buffers.kernels.launching import Launcher

_BLOCK = 1024


@triton.jit
def _write_segments(blob, BLOCK: tl.constexpr):
    entry = blob.to(tl.pointer_type(tl.int64)) + 3 * tl.program_id(0)
    target = tl.load(entry).to(tl.pointer_type(tl.uint8))
    length = tl.load(entry + 1)
    source = blob + tl.load(entry + 2)
    for begin in range(0, length, BLOCK):
        byte = begin + tl.arange(0, BLOCK)
        tl.store(target + byte, tl.load(source + byte, mask=byte < length), mask=byte < length)


_launch = Launcher(_write_segments, n_warps=4)


def write_segments(blob: th.Tensor, n_segments: int) -> None:
    """Write segments to the addresses that a table at the beginning of ``blob`` says.

    The table has three ``int64`` for each segment: its address, its length, and where in ``blob`` its bytes are.
    """
    _launch(blob.device, (n_segments, 1), None, blob, _BLOCK)
