"""Codecs whose records are written and read by kernels.

Their records have the same bytes as those of the codecs in :mod:`sb3_extra_buffers.codecs`. The host keeps the index of
records and the reference counts. Only the device has the frames and the reference frames.
"""

from __future__ import annotations

import numpy as np
import torch as th

from sb3_extra_buffers.codecs.base import Codec, FrameSpec, Indices
from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.codecs.delta_words import DeltaWordsCodec
from sb3_extra_buffers.codecs.rle import RleCodec
from sb3_extra_buffers.gpu_buffers.kernels import DeviceFrames, ObservationBatch, RepeatedLaunch, kernel_module
from sb3_extra_buffers.storage.config import CodecRecipe


class DeviceDelta(DeltaWordsCodec):
    """``delta``. On the host, ``reference_frames`` are only valid right after :meth:`fetch_references` or loading."""

    @property
    def reference_bytes(self) -> int:
        return 4 * self._n_words * len(self._uses)

    def measure(self, frames: DeviceFrames) -> None:
        """Measure the next records of each lane, and fill the report of ``frames``."""
        kernel_module("delta").measure_delta(frames)

    def write(self, frames: DeviceFrames) -> None:
        """Write the measured records, as the orders of ``frames`` say."""
        kernel_module("delta").write_delta(frames)

    def gather_launch(self, frames: DeviceFrames, batch: ObservationBatch) -> RepeatedLaunch:
        """The launch that rebuilds ``batch``, for this batch and others of its size from the same tensors."""
        launch: RepeatedLaunch = kernel_module("delta").gather_delta(frames, batch)
        return launch

    def references_for(self, n_lanes: int) -> Indices:
        """The number of each lane's current reference frame; 0 if the lane has none yet."""
        self._make_room_for_lanes(n_lanes)
        return self._current[:n_lanes]

    def lanes_to_renew(self, saved: Indices, n_records: Indices) -> Indices:
        """The lanes whose newest frame should become their reference.

        :param saved: For each lane, how many words a newer reference would have saved in the newest frame.
        :param n_records: How many new records of the lane that frame stands for.
        """
        self._regret = np.maximum(self._regret + 5 * saved * n_records, 0)
        return np.flatnonzero((self._regret > 2 * self.frame.nbytes) & (saved > 0))

    def new_references(self, n: int) -> Indices:
        """Allocate ``n`` reference numbers. The device is going to write their frames."""
        found = np.array([self._uses.new() for _ in range(n)], dtype=np.int64)
        if len(self._uses) > len(self._frames):
            # The host only needs the right number of rows. Pages that are never written take no memory.
            self._frames = np.zeros((len(self._uses) * 5 // 4 + 4, self._n_words), dtype=np.uint32)
        return found

    def use_references(self, lanes: Indices, references: Indices, used: Indices) -> None:
        """Count references that the device has used.

        :param lanes: Lanes with a new reference.
        :param references: The new reference of each of ``lanes``.
        :param used: The references of new records.
        """
        self._uses.incref(used)
        if len(lanes):
            self._uses.decref(self._current[lanes])
            self._current[lanes] = references
            self._regret[lanes] = 0

    def fetch_references(self, table: th.Tensor) -> None:
        """Copy the reference frames to the host."""
        frames = np.zeros((len(self._uses), self._n_words), dtype=np.uint32)
        known = table[: len(frames)].cpu().numpy().view(np.uint32)
        frames[: len(known)] = known
        self._frames = frames


class DeviceRle(RleCodec):
    """``rle``. Its records need no references."""

    def measure(self, frames: DeviceFrames) -> None:
        kernel_module("rle").measure_rle(frames, *self._sizes)

    def write(self, frames: DeviceFrames) -> None:
        kernel_module("rle").write_rle(frames, *self._sizes)

    def gather_launch(self, frames: DeviceFrames, batch: ObservationBatch) -> RepeatedLaunch:
        launch: RepeatedLaunch = kernel_module("rle").gather_rle(frames, batch, *self._sizes[:2])
        return launch

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.runs_type.itemsize, self.element_type.itemsize, self.longest_run


DeviceCodec = DeviceDelta | DeviceRle


def device_codec(recipe: CodecRecipe, frame: FrameSpec) -> DeviceCodec | None:
    """The codec for a method that has kernels; ``None`` for other methods."""
    codec: Codec = recipe.build(frame)
    if isinstance(codec, DeltaCodec):
        return DeviceDelta(frame, frames_per_record=codec.frames_per_record)
    return DeviceRle(frame, runs_type=codec.runs_type) if isinstance(codec, RleCodec) else None


def host_codec(recipe: CodecRecipe, frame: FrameSpec) -> Codec:
    """The codec for a method whose records a GPU buffer keeps in host memory."""
    codec = recipe.build(frame)
    # The same record format as the kernels use: saved buffers move between machines with and without a GPU.
    return DeltaWordsCodec(frame, **recipe.options) if isinstance(codec, DeltaCodec) else codec
