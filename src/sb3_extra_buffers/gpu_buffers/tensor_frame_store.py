"""A device frame store for observations that are on the device already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.errors import CapacityError
from sb3_extra_buffers.gpu_buffers import device_writer
from sb3_extra_buffers.gpu_buffers.delta_codec import BatchDeltaCodec
from sb3_extra_buffers.gpu_buffers.device_frame_store import DeviceFrameStore, packed_entries
from sb3_extra_buffers.gpu_buffers.device_writer import DeviceWriter
from sb3_extra_buffers.gpu_buffers.kernels.frames import Hints
from sb3_extra_buffers.gpu_buffers.kernels.lanes import Jobs
from sb3_extra_buffers.gpu_buffers.transfer import Outbox, upload
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.storage.frame_store import numbers_from

Receiver = Callable[[npt.NDArray[Any]], None]


class News(NamedTuple):
    """What the host is to learn."""

    tensors: list[th.Tensor]
    receivers: list[Receiver]
    """Who is to get each."""
    when_sent: Callable[[], None]
    """To be called when they are on their way."""


def no_news() -> News:
    return News([], [], lambda: None)


class TensorFrameStore(DeviceFrameStore):
    """Takes observations from the host or from the device, as they come.

    As long as they come from the device, ``heads`` and everything else here lags behind what the device knows: it is as
    of the last report. See :mod:`.device_writer`.
    """

    _writer: DeviceWriter | None = None
    """Set while observations come from the device."""
    _receivers: list[Receiver]

    @property
    def takes_tensors(self) -> bool:
        return device_writer.encodes_on(self.device, self.codec)

    @property
    def is_ahead(self) -> bool:
        """Whether the device knows more than the host."""
        return self._writer is not None

    def make_room_on_device(self, n_observations: int, oldest: Callable[[], Indices], news: Callable[[], News]) -> None:
        """For so many observations per lane. All that can fail happens here, before anything is stored.

        :param news: Asked for what the host should learn together with the lengths of records.
        """
        writer = self._writer or self._hand_over(oldest)
        n_frames = n_observations * self.layout.stack
        self.collect(oldest)
        if writer.report is None and self._bound(writer) + n_frames > writer.n_frames // 2:
            self._ask(writer, news)
        while self._bound(writer) + n_frames > writer.n_frames:
            if writer.report is None:
                self._ask(writer, news)
            self._place(writer, oldest)

    def append_on_device(self, observations: list[th.Tensor], ends: list[th.Tensor], slots: list[int]) -> None:
        """Append observations, for which there is room; see :func:`.append_torch.append_observations`."""
        assert self._writer is not None
        self._writer.append(observations, ends, slots)

    def drop_news(self) -> bool:
        """Nobody is to be told what a report under way brings beside lengths; whether it brings anything."""
        dropped, self._receivers = bool(self._receivers), []
        return dropped

    def collect(self, oldest: Callable[[], Indices]) -> None:
        """Do what a report asks for, if one has arrived. Frames for which there is no room go on waiting."""
        writer = self._writer
        if writer is not None and writer.report is not None and writer.report.has_arrived:
            with contextlib.suppress(CapacityError):
                self._place(writer, oldest)

    def take_back(self, oldest: Callable[[], Indices]) -> None:
        """Let the host know everything, for which the device must be waited for."""
        writer = self._writer
        if writer is None:
            return
        with contextlib.suppress(CapacityError):
            while writer.report is not None or writer.unreported:
                if writer.report is None:
                    self._ask(writer, no_news)
                self._place(writer, oldest)
        # As long as there is a writer, nobody looks at what is prepared here.
        self.heads[:] = writer.lanes.heads.cpu().numpy()
        lanes, numbers = self._waiting_frames()
        self._most_waiting = int((self.heads - self.encoded).max())
        if self._most_waiting > self.ring.shape[1]:
            self.ring = np.zeros(writer.lanes.ring.shape, dtype=np.uint8)
        found = writer.lanes.ring.cpu().numpy()
        self.ring[lanes, numbers % self.ring.shape[1]] = found[lanes, numbers % writer.n_frames]
        if isinstance(self.codec, BatchDeltaCodec):
            table = self._copy.table.cpu().numpy().view(np.uint32)
            n = min(len(table), len(self.codec.reference_frames))
            self.codec.reference_frames[:n] = table[:n]
        ring = th.zeros(self.ring.shape, dtype=th.uint8, device=self.device)
        with uninterrupted():
            self._writer = None
            self.newest.forget()
            self._copy = self._copy._replace(ring=ring, any_waiting=False)
            self._changed = True

    def clear(self) -> None:
        writer = self._writer
        if writer is None:
            super().clear()
            return
        with uninterrupted():
            self.heads += self.layout.stack * writer.unknown
            super().clear()
            writer.restart(self.heads)
            self.newest.known[:] = True

    def hints_for_any(self) -> Hints:
        """What holds for all frames, where the host does not know which are wanted."""
        encoded = self.lengths[self.lengths != self.codec.record_bytes]
        return Hints(int(encoded.max(initial=0)), any_raw=True, any_waiting=True, any_missing=True)

    def _bound(self, writer: DeviceWriter) -> int:
        """At least as many frames as wait in any lane."""
        return int((self.heads - self.encoded).max()) + self.layout.stack * writer.unknown

    def _hand_over(self, oldest: Callable[[], Indices]) -> DeviceWriter:
        """From now on, the device keeps the newest frames."""
        self.encode_waiting(oldest)
        with Outbox(self.device) as outbox:
            self.flush(outbox)
        lanes, numbers = self._waiting_frames()
        fewest = int((self.heads - self.encoded).max()) + 4 * self.layout.stack
        writer = DeviceWriter(self.codec, self.heads, self.layout.stack, self.device, fewest)
        if len(lanes):
            rows = upload(lanes * writer.n_frames + numbers % writer.n_frames, self.device)
            waiting = upload(self.ring[lanes, numbers % self.ring.shape[1]], self.device)
            writer.lanes.ring.view(-1, waiting.shape[1]).index_copy_(0, rows, waiting)
        with uninterrupted():
            self._copy = self._copy._replace(ring=writer.lanes.ring, any_waiting=True)
            self._receivers = []
            self._writer = writer
            # The newest observation is known to the device: records that it shares frames with must stay.
            self.newest.known[:] = True
            self._changed = True
        return writer

    def _ask(self, writer: DeviceWriter, news: Callable[[], News]) -> None:
        if isinstance(self.codec, BatchDeltaCodec):
            references = self.codec.references_for(self.n_lanes)
            if not references.all():
                self._renew_references(writer, self.codec, np.flatnonzero(references == 0))
            references = self.codec.references_for(self.n_lanes)
        else:
            references = np.zeros(self.n_lanes, dtype=np.int64)
        with Outbox(self.device) as outbox:
            self.flush(outbox)
        tensors, self._receivers, when_sent = news()
        writer.ask(self._copy.encoded, self._copy.table, references, tensors)
        when_sent()

    def _place(self, writer: DeviceWriter, oldest: Callable[[], Indices]) -> None:
        """Find room for the records of a report, which is waited for, and have them written."""
        rows, *news = writer.take_report()
        for receive, array in zip(self._receivers, news, strict=False):
            receive(array)
        self._receivers = []
        self.heads[:] = rows[:, 0]
        saved, all_lengths = rows[:, 1], rows[:, 2:]
        counts = np.count_nonzero(all_lengths, axis=1)
        lanes, numbers = numbers_from(self.encoded // self.codec.frames_per_record, counts)
        lengths = all_lengths[all_lengths > 0]
        references = writer.references[lanes]
        if len(lanes):
            starts = self._room_for(counts, lengths, oldest)
            first_frames = numbers * self.codec.frames_per_record
            jobs = np.stack([lanes, first_frames, starts, packed_entries(lengths, references)])
            writer.write(Jobs(upload(jobs, self.device)), self._copy.table, self.arena.heap)
            self._enter_reported(writer, (counts, lanes, numbers, starts, lengths, references))
        else:
            writer.settle()
        if isinstance(self.codec, BatchDeltaCodec):
            self._renew_references(writer, self.codec, self.codec.lanes_to_renew(saved, counts))

    def _enter_reported(self, writer: DeviceWriter, records: tuple[Indices, ...]) -> None:
        """Enter the records of a report, each of them once."""
        codec, references, encoded_before = self.codec, records[-1], self.encoded
        if isinstance(codec, BatchDeltaCodec):
            codec.take_references(references)
        try:
            # Without the report, frames that are in no record yet are measured anew. With it they would be entered
            # twice.
            writer.settle()
            self._enter(*records)
        except BaseException:
            if self.encoded is encoded_before:
                codec.release(references)
            raise

    def _renew_references(self, writer: DeviceWriter, codec: BatchDeltaCodec, lanes: Indices) -> None:
        """Make the newest frames of lanes their references."""
        if len(lanes):
            frames = writer.newest_words()[upload(lanes, self.device)]
            self._grow_table(codec.most_references(len(lanes)))
            with uninterrupted():
                self._copy.table.index_copy_(0, upload(codec.renew(lanes), self.device), frames)

    def _copy_waiting(self, outbox: Outbox) -> None:
        if self._writer is None:
            super()._copy_waiting(outbox)
        else:
            outbox.put(self._copy.encoded, 0, self.encoded)
