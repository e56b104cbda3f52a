"""Codecs whose records are written and read by kernels.

The bytes are those of the codecs in :mod:`sb3_extra_buffers.codecs`. The host keeps account of records and references;
frames, and the frames that they refer to, are known to the device alone.
"""

from __future__ import annotations

import numpy as np
import torch as th

from sb3_extra_buffers.codecs.base import Codec, FrameSpec, Indices
from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.codecs.delta_words import DeltaWordsCodec
from sb3_extra_buffers.codecs.rle import RleCodec
from sb3_extra_buffers.gpu_buffers.kernels import DeviceFrames, ObservationBatch, kernel_module
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.storage.config import CodecRecipe


class DeviceDelta(DeltaWordsCodec):
    """``delta``. ``reference_frames`` are as of the last time that they were fetched from the device."""

    def __init__(self, frame: FrameSpec, *, frames_per_record: int = 1) -> None:
        super().__init__(frame, frames_per_record=frames_per_record)

    def measure(self, frames: DeviceFrames, references: th.Tensor, n_records: int) -> th.Tensor:
        """For each lane, ``int64``: what a newer reference would save, and the lengths of its next records.

        The first is the number of words fewer that the newest frame takes after the frame before it than after the
        reference.
        """
        lengths = kernel_module("delta").measure_delta(frames, references, n_records)
        newest = newest_frames(frames)
        changes = (newest != frames.table[references]).sum(1, keepdim=True)
        recent_changes = (newest != newest_frames(frames, back=2)).sum(1, keepdim=True)
        # Frames of zeros, which fill up stacks after a reset, say nothing about the scene.
        saved = (changes - recent_changes) * (newest != 0).any(1, keepdim=True)
        return th.cat([saved, lengths], dim=1)

    def write(self, frames: DeviceFrames, jobs: th.Tensor) -> None:
        kernel_module("delta").write_delta(frames, jobs)

    def gather(self, frames: DeviceFrames, batch: ObservationBatch) -> None:
        kernel_module("delta").gather_delta(frames, batch)

    def references_for(self, n_lanes: int) -> Indices:
        """The reference of each lane; 0 where a lane has none yet."""
        self._make_room_for_lanes(n_lanes)
        return self._current[:n_lanes].copy()

    def incref(self, references: Indices) -> None:
        """Count uses by records that the device has written."""
        self._uses.incref(references)

    def lanes_to_renew(self, saved: Indices, n_records: Indices) -> Indices:
        """The lanes whose newest frame should become their reference.

        :param saved: As :meth:`measure` returned it.
        :param n_records: How many records it stands for.
        """
        saved = np.maximum(5 * saved, 0)
        self._regret += saved * n_records
        return np.flatnonzero((self._regret > self.frame.nbytes) & (saved > 0))

    def most_references(self, more: int) -> int:
        """There will be no more references than this after ``more`` were renewed."""
        return max(len(self._uses) + more, len(self._frames))

    def renew(self, lanes: Indices) -> Indices:
        """New numbers for the references of lanes, whose frames are on the device."""
        with uninterrupted():
            return np.array([self._new_reference(lane) for lane in lanes], dtype=np.int64)

    def _new_reference(self, lane: np.int64) -> int:
        self._uses.decref(self._current[[lane]])
        self._current[lane] = number = self._uses.new()
        if number >= len(self._frames):
            self._frames = np.concatenate([self._frames, np.zeros((4, self._n_words), dtype=np.uint32)])
        self._regret[lane] = 0
        return number

    def fetch_references(self, table: th.Tensor) -> None:
        """Let the host know the reference frames."""
        n = min(len(table), len(self._frames))
        self._frames[:n] = table[:n].cpu().numpy().view(np.uint32)


class DeviceRle(RleCodec):
    """``rle``, whose records refer to nothing."""

    def measure(self, frames: DeviceFrames, references: th.Tensor, n_records: int) -> th.Tensor:
        lengths: th.Tensor = kernel_module("rle").measure_rle(frames, n_records, *self._sizes)
        return th.cat([th.zeros_like(lengths[:, :1]), lengths], dim=1)

    def write(self, frames: DeviceFrames, jobs: th.Tensor) -> None:
        kernel_module("rle").write_rle(frames, jobs, *self._sizes)

    def gather(self, frames: DeviceFrames, batch: ObservationBatch) -> None:
        kernel_module("rle").gather_rle(frames, batch, *self._sizes[:2])

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.runs_type.itemsize, self.element_type.itemsize, self.longest_run


DeviceCodec = DeviceDelta | DeviceRle


def device_codec(recipe: CodecRecipe, frame: FrameSpec) -> DeviceCodec | None:
    """The codec for a method that the device encodes and decodes; ``None`` for others."""
    codec: Codec = recipe.build(frame)
    if isinstance(codec, DeltaCodec):
        return DeviceDelta(frame, frames_per_record=codec.frames_per_record)
    return DeviceRle(frame, runs_type=codec.runs_type) if isinstance(codec, RleCodec) else None


def host_codec(recipe: CodecRecipe, frame: FrameSpec) -> Codec:
    """The codec for a method whose records a GPU buffer keeps in host memory."""
    codec = recipe.build(frame)
    # The records of a device, so that a buffer that is saved on one machine can be loaded on another.
    return DeltaWordsCodec(frame, **recipe.options) if isinstance(codec, DeltaCodec) else codec


def newest_frames(frames: DeviceFrames, back: int = 1) -> th.Tensor:
    """The newest frame of each lane, or one before it, as ``int32`` words."""
    lanes = th.arange(len(frames.heads), device=frames.heads.device)
    found = frames.ring[lanes, (frames.heads - back) % frames.ring_frames]
    missing = -found.shape[1] % 4
    padded = th.nn.functional.pad(found, (0, missing)) if missing else found
    return padded.view(th.int32)
