"""Frames that arrive on the device, and are encoded there.

The device compares observations, keeps new frames in a ring and measures the records that they would make. How long
these are is copied to the host in the background: a :class:`Report`, which is read some steps later. Then the host,
which keeps account of all records, finds room for them and has the device write them. Until then frames are sampled
from the ring, so nobody has to wait. Only where the host is further ahead of the device than the ring reaches does it
wait.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Codec, Indices
from sb3_extra_buffers.codecs.rle import RleCodec
from sb3_extra_buffers.gpu_buffers import kernels
from sb3_extra_buffers.gpu_buffers.delta_codec import BatchDeltaCodec
from sb3_extra_buffers.gpu_buffers.kernels import append_torch, delta_encode_torch, rle_encode_torch
from sb3_extra_buffers.gpu_buffers.kernels.lanes import Jobs, Lanes, as_words, ring_frames
from sb3_extra_buffers.gpu_buffers.kernels.rle_encode_torch import RunFormat
from sb3_extra_buffers.gpu_buffers.transfer import upload

_RING_STEPS = 24
_RING_BYTES = 4 << 20


def encodes_on(device: th.device, codec: Codec) -> bool:
    """Whether frames that are on ``device`` are encoded there."""
    return device.type == "cuda" and isinstance(codec, BatchDeltaCodec | RleCodec)


class Report:
    """Tensors on their way to the host."""

    def __init__(self, tensors: list[th.Tensor]) -> None:
        on_gpu = tensors[0].device.type == "cuda"
        self._copies = [th.empty(part.shape, dtype=part.dtype, pin_memory=on_gpu) for part in tensors]
        for copy, part in zip(self._copies, tensors, strict=True):
            copy.copy_(part, non_blocking=on_gpu)
        self._arrived = th.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record(th.cuda.current_stream(tensors[0].device))

    @property
    def has_arrived(self) -> bool:
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[npt.NDArray[Any]]:
        """What they hold."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [copy.numpy() for copy in self._copies]


class DeviceWriter:
    """The frames of some lanes from their heads on.

    :param heads: The number of the next frame of each lane.
    :param fewest: How many frames the ring must hold at least.
    """

    def __init__(self, codec: Codec, heads: Indices, stack: int, device: th.device, fewest: int) -> None:
        self.codec = codec
        self.stack = stack
        group, frame_bytes, n_lanes = codec.frames_per_record, codec.frame.nbytes, len(heads)
        # A step may bring two whole observations. While the records of one half of the ring are measured, frames go to
        # the other.
        affordable = min(2 * stack * _RING_STEPS, _RING_BYTES // (n_lanes * frame_bytes))
        n_frames = max(6 * stack + group, affordable, fewest)
        n_frames = -(-n_frames // group) * group
        self.lanes = Lanes(
            th.zeros((n_lanes, n_frames, frame_bytes), dtype=th.uint8, device=device),
            upload(heads, device),
            th.zeros(n_lanes, dtype=th.int32, device=device),
        )
        self._headers = th.zeros((n_lanes, n_frames), dtype=th.int32, device=device)
        self.report: Report | None = None
        self.references = np.zeros(n_lanes, dtype=np.int64)
        """What the frames of the report were compared with."""
        self.unreported = 0
        """Observations that arrived in each lane since the report, or else since the heads were last known."""
        self._reported = 0
        self._by_kernel = kernels.uses_triton(device)

    @property
    def n_frames(self) -> int:
        """What the ring holds, in each lane."""
        return self.lanes.ring.shape[1]

    @property
    def unknown(self) -> int:
        """Observations in each lane that the host does not know the number of frames of."""
        return self._reported + self.unreported

    def restart(self, heads: Indices) -> None:
        """Forget all frames."""
        self.lanes.heads.copy_(upload(heads, self.lanes.heads.device))
        self.lanes.known.zero_()
        self.report = None
        self.unreported = self._reported = 0

    def append(self, observations: list[th.Tensor], ends: list[th.Tensor], slots: list[int]) -> None:
        """Append observations, (lanes, stack, frame_bytes); see :func:`.append_torch.append_observations`."""
        if self._by_kernel:
            from sb3_extra_buffers.gpu_buffers.kernels.append_triton import append_observations

            append_observations(self.lanes, observations, ends, slots)
        else:
            append_torch.append_observations(self.lanes, observations, ends, slots)
        self.unreported += len(observations)

    def newest_words(self, back: int = 1) -> th.Tensor:
        """The newest frame of each lane, or one before it, as words."""
        which = th.arange(len(self.lanes.heads), device=self.lanes.heads.device)
        return as_words(ring_frames(self.lanes, which, self.lanes.heads - back))

    def ask(self, encoded: th.Tensor, table: th.Tensor, references: Indices, along: list[th.Tensor]) -> None:
        """Have all complete records measured. The report has heads, then ``along``."""
        self.references = references
        self.report = Report([self._measured(encoded, table, references), *along])
        self._reported, self.unreported = self.unreported, 0

    def take_report(self) -> list[npt.NDArray[Any]]:
        """What the report says: a row for each lane, of its head, what a newer reference would save, and the lengths
        of its records; then what came along. It is there until :meth:`settle`."""
        assert self.report is not None
        return self.report.wait()

    def settle(self) -> None:
        """All that the report tells has been done."""
        self.report = None
        self._reported = 0

    def write(self, jobs: Jobs, table: th.Tensor, heap: th.Tensor) -> None:
        """Write records that were measured."""
        delta, rle = self._encoders()
        if isinstance(self.codec, RleCodec):
            rle.write_rle(self.lanes, jobs, heap, _run_format(self.codec))
        else:
            delta.write_delta(self.lanes, table, self._headers, jobs, heap, self.codec.frames_per_record)

    def _measured(self, encoded: th.Tensor, table: th.Tensor, references: Indices) -> th.Tensor:
        delta, rle = self._encoders()
        heads = self.lanes.heads[:, None]
        if isinstance(self.codec, RleCodec):
            lengths = rle.measure_rle(self.lanes, encoded, _run_format(self.codec))
            return th.cat([heads, th.zeros_like(heads), lengths], dim=1)
        numbers = upload(references, encoded.device)
        group = self.codec.frames_per_record
        lengths = delta.measure_delta(self.lanes, encoded, table, numbers, self._headers, group)
        newest = self.newest_words()
        changes = (newest != table[numbers]).sum(1, keepdim=True)
        recent_changes = (newest != self.newest_words(2)).sum(1, keepdim=True)
        # Frames of zeros, which fill up stacks after a reset, say nothing about the scene.
        saved = (changes - recent_changes) * (newest != 0).any(1, keepdim=True)
        return th.cat([heads, saved, lengths], dim=1)

    def _encoders(self) -> tuple[Any, Any]:
        if not self._by_kernel:
            return delta_encode_torch, rle_encode_torch
        from sb3_extra_buffers.gpu_buffers.kernels import delta_encode_triton, rle_encode_triton

        return delta_encode_triton, rle_encode_triton


def _run_format(codec: RleCodec) -> RunFormat:
    return RunFormat(codec.runs_type.itemsize, codec.element_type.itemsize, codec.longest_run)
