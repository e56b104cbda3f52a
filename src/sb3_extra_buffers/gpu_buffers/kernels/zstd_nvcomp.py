"""Frames of ``zstd`` records, one to a record, by nvCOMP."""

from __future__ import annotations

import torch as th

from sb3_extra_buffers.gpu_buffers import nvcomp
from sb3_extra_buffers.gpu_buffers.kernels.frames import DeviceFrames, find_records


def decode_zstd_nvcomp(frames: DeviceFrames, lanes: th.Tensor, numbers: th.Tensor) -> th.Tensor:
    """The frames ``numbers`` of ``lanes``, ``(n, frame_bytes)``, all of which must be in compressed records.

    nvCOMP reads memory that is not its own when it is given anything else. Frames that several observations share are
    decoded for each of them: the time is that of the slowest record.
    """
    records = find_records(frames, lanes, numbers)
    decoded = th.empty((lanes.numel(), frames.frame_bytes), dtype=th.uint8, device=lanes.device)
    nvcomp.decompress_to_rows(records.starts + frames.heap.data_ptr(), records.lengths, decoded)
    return decoded
