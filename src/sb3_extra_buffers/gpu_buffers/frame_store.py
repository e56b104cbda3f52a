"""Frames on a torch device: new ones in a ring, all others in records.

The device compares each observation with the previous one, and appends new frames to the ring. When the ring is nearly
full, the device measures the records that its frames would make. It copies the lengths, the heads and the oldest frames
in use to the host in the background: a :class:`.Report`. Some steps later, the host reads it, allocates room for the
records, and lets the device write them. Until then, frames are sampled from the ring. The host only waits if the ring
could overflow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.errors import CapacityError
from sb3_extra_buffers.gpu_buffers.arena import CappedFrameStore, DeviceArena, HeapBudget
from sb3_extra_buffers.gpu_buffers.device_codecs import DeviceCodec, DeviceDelta
from sb3_extra_buffers.gpu_buffers.driver import DeviceMemory
from sb3_extra_buffers.gpu_buffers.kernels import (
    LENGTH_BITS,
    REPORT_HEADER,
    DeviceFrames,
    FieldRow,
    ObservationBatch,
    RepeatedLaunch,
    kernel_module,
)
from sb3_extra_buffers.gpu_buffers.record_validation import check_device_copy, check_records
from sb3_extra_buffers.gpu_buffers.transfer import (
    Observations,
    ObservationStaging,
    Places,
    Progress,
    Report,
    Staging,
    copy_into,
    upload,
)
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.record_index import RecordIndex
from sb3_extra_buffers.storage.stacking import StackLayout, numbers_from

_RING_FRAMES, _RING_BYTES = 288, 32 << 20
"""The most frames of each lane in the ring, and the most bytes of the whole ring. A few steps always fit."""
_RING_RESERVE = 24
"""Frames of the ring that stay free for new frames while records are measured."""
_MOST_LAUNCHES = 8
"""How many launches to keep. Each size of a batch has its own."""
_NOTHING = np.zeros(0, dtype=np.int64)
Records = tuple[Indices, Indices, Indices, Indices]
_NO_RECORDS: Records = (_NOTHING, _NOTHING, _NOTHING, _NOTHING)


class DeviceFrameStore(CappedFrameStore):
    """A frame store on ``device``. The host only knows the ``heads`` of the newest report.

    :param index_size: The number of records per lane for which the index has room from the start.
    """

    codec: DeviceCodec
    arena: DeviceArena
    tensors: DeviceFrames
    """The tensors that kernels read and write."""
    ends: list[th.Tensor]
    """For each column, where its observations end, ``int32`` (slots, lanes). Frames that no observation needs are
    released. While the list is empty, none are."""

    def __init__(
        self,
        codec: DeviceCodec,
        n_lanes: int,
        layout: StackLayout,
        device: th.device,
        budget: HeapBudget,
        index_size: int = 8,
    ) -> None:
        super().__init__(codec, n_lanes, layout, DeviceArena(device, budget))
        self.device = device
        self.index = RecordIndex(n_lanes, index_size)
        self.ends = []
        self.staging = ObservationStaging(layout, n_lanes, device)
        self._launches: dict[Any, tuple[tuple[Any, ...], RepeatedLaunch]] = {}
        """Prepared launches that rebuild batches, for further batches of the same size from the same tensors."""
        self._report_is_pending = False
        self._appended = self._in_report = self._in_heads = self._in_waiting = 0
        """The number of observations per lane that the device was told to append; and how many of them are included in
        the report, in :attr:`heads` and in :attr:`_most_waiting`."""
        self._create_tensors()

    def make_room(self, n_observations: int, oldest: Callable[[], Indices]) -> None:
        ring_frames = self.tensors.ring_frames
        enough = ring_frames - min(ring_frames // 4, _RING_RESERVE)
        if self._report_is_pending and self._report.has_arrived:
            with contextlib.suppress(CapacityError):  # without room in the arena, frames stay in the ring
                self._place_records()
        if self._most_waiting_after(n_observations) > (ring_frames if self._report_is_pending else enough):
            self._update_most_waiting()
            # Request it a little early: otherwise the host would look again at each of the next steps.
            if not self._report_is_pending and self._most_waiting_after(n_observations) > enough - enough // 16:
                self._request_report()
        while self._most_waiting_after(n_observations) > ring_frames:
            if not self._report_is_pending:
                self._request_report()
            try:
                self._place_records()
            except CapacityError:
                if self._in_report == self._appended:
                    raise
                self._request_report()  # more frames may be unused by now

    def _most_waiting_after(self, n_observations: int) -> int:
        """An upper bound for the frames of a lane in the ring after ``n_observations`` more."""
        return self._most_waiting + self.layout.stack * (self._appended - self._in_waiting + n_observations)

    def _update_most_waiting(self) -> None:
        """Improve the bound for the frames in the ring, by what the device has appended so far."""
        done, heads = self._progress.look(self._appended)
        if done > self._in_waiting:
            self._most_waiting, self._in_waiting = int((heads - self.encoded).max()), done

    def append(self, lanes: Indices, observations: npt.NDArray[Any], oldest: Callable[[], Indices]) -> Indices:
        """Append observations from the host, which waits for the device."""
        self.make_room(1, oldest)
        ends = th.zeros((1, self.n_lanes), dtype=th.int32, device=self.device)
        self.append_on_device(self.staging.send([observations]), [ends], [0], lanes)
        found: Indices = ends.cpu().numpy().view(np.uint32)[0, lanes].astype(np.int64)
        return found

    def append_on_device(
        self,
        observations: Observations,
        ends: list[th.Tensor],
        slots: Sequence[int],
        lanes: Indices | None = None,
        fields: FieldRow | None = None,
    ) -> None:
        """Append observations after :meth:`make_room`; see :mod:`.kernels.append`."""
        self._appended += len(observations.parts)
        which = self._all_lanes if lanes is None else upload(lanes, self.device)
        kernel_module("append").append_observations(
            self.tensors, which, observations, ends, slots, self._progress.words, self._appended, fields
        )
        if lanes is None:
            self.staging.note_appended()

    def _request_report(self) -> None:
        """Let the device measure all complete records in the ring, and request its report."""
        if isinstance(self.codec, DeviceDelta):
            self._write_records(_NO_RECORDS, np.flatnonzero(self.codec.references_for(self.n_lanes) == 0))
        self.codec.measure(self.tensors)
        if self.ends:
            kernel_module("append").find_oldest(self.tensors, self.ends)
        self._report.request()
        self._report_is_pending, self._in_report = True, self._appended

    def _place_records(self) -> None:
        """Wait for the report, allocate room for its records, and let the device write them."""
        rows: Indices = self._report.wait()
        np.maximum(self.heads, rows[:, 0], out=self.heads)
        self._in_heads = self._in_report
        oldest = rows[:, 2] - self.layout.stack if self.ends else np.zeros_like(self.heads)
        counts = (rows[:, 0] - rows[:, 3]) // self.codec.frames_per_record
        all_lengths, most = rows[:, REPORT_HEADER:], int(counts.max())
        records = _NO_RECORDS
        while most and not len(records[0]):
            firsts = self.encoded // self.codec.frames_per_record
            lanes, numbers = numbers_from(firsts, counts)
            lengths = all_lengths[:, :most][np.arange(most) < counts[:, None]]
            self._make_index_room(firsts + counts, lambda: oldest)
            try:
                start = self.allocate(int(lengths.sum()), lambda: oldest)
            except CapacityError:
                if most == 1:
                    raise
                most = most // 2  # the first ones may be unused already; once stored, they can be released
                counts = np.minimum(counts, most)
            else:
                records = lanes, numbers, start + np.cumsum(lengths) - lengths, lengths
        self._report_is_pending = False  # before anything can fail: records must not be entered twice
        to_renew = self.codec.lanes_to_renew(rows[:, 1], counts) if isinstance(self.codec, DeviceDelta) else _NOTHING
        self._write_records(records, to_renew)
        self._most_waiting, self._in_waiting = int((self.heads - self.encoded).max()), self._in_heads

    def _write_records(self, records: Records, to_renew: Indices) -> None:
        """Let the device write measured records, and make the newest frames of some lanes their references.

        :param records: The lane, number, start and length of each record.
        """
        codec, group = self.codec, self.codec.frames_per_record
        lanes, numbers, starts, lengths = records
        if not len(lanes) and not len(to_renew):
            return
        self._send_index()
        references, renewed = np.zeros_like(lanes), _NOTHING
        if isinstance(codec, DeviceDelta):
            references = codec.references_for(self.n_lanes)[lanes]
        n_new = np.bincount(lanes, minlength=self.n_lanes)
        encoded = self.encoded + group * n_new
        self._index_is_stale = True  # until host and device agree again, in case something fails before
        try:
            row = self._orders.next()
            orders = self._orders.arrays[row][: 3 * self.n_lanes].reshape(3, self.n_lanes)
            orders[0, lanes[::-1]] = starts[::-1]  # backwards, so that the start of each lane's first record remains
            orders[1], orders[2] = n_new, 0
            if isinstance(codec, DeviceDelta) and len(to_renew):
                renewed = codec.new_references(len(to_renew))
                self._grow_table(int(renewed.max()) + 1)
                orders[2, to_renew] = renewed
            self._orders.send(row)
            codec.write(self.tensors)
        except BaseException:
            self._recount_uses()
            raise
        # Nothing can fail from here on. The records exist once ``encoded`` says so.
        with uninterrupted():
            self.index.write(lanes, numbers, starts, lengths, references)
            if isinstance(codec, DeviceDelta):
                codec.use_references(to_renew, renewed, references)
            self._bytes_encoded += int(lengths.sum())
            self._frames_encoded += group * len(lanes)
            self.encoded = encoded
            self._index_is_stale = False

    def allocate(self, size: int, oldest: Callable[[], Indices]) -> int:
        generation = self.arena.generation
        try:
            return super().allocate(size, oldest)
        finally:
            if self.tensors.heap is not self.arena.heap:
                self.tensors = self.tensors._replace(heap=self.arena.heap)
            self._index_is_stale |= generation != self.arena.generation
            self._send_index()

    def _grow_index(self) -> None:
        self._index_is_stale = True
        super()._grow_index()

    def release(self, oldest: Indices) -> None:
        # The next observation may share frames with the newest one.
        with uninterrupted():
            super().release(np.minimum(oldest, self.heads - self.layout.stack))

    def clear(self) -> None:
        with uninterrupted():
            FrameStore.release(self, self.encoded)
            self.heads = self.heads + self.layout.stack * (self._appended - self._in_heads)
            super().clear()
            self.send_numbers()
            self.tensors.known.zero_()
            self.staging.forget()

    def fetch_heads(self) -> None:
        """Wait for the device, and copy its heads to the host."""
        self.heads[:] = self.tensors.heads.cpu().numpy()
        self._most_waiting = int((self.heads - self.encoded).max())
        self._in_heads = self._in_waiting = self._appended

    def settle(self) -> None:
        """Wait for the device, and encode all complete records, as far as there is room."""
        self.fetch_heads()
        with contextlib.suppress(CapacityError):
            while self._report_is_pending or (self.heads - self.encoded >= self.codec.frames_per_record).any():
                if not self._report_is_pending:
                    self._request_report()
                self._place_records()

    def send_numbers(self) -> None:
        """Send ``heads`` and ``encoded`` to the device after the host has changed them. Discards a pending report."""
        copy_into(self.tensors.heads, self.heads)
        copy_into(self.tensors.encoded, self.encoded)
        self._report_is_pending = False
        self._most_waiting = int((self.heads - self.encoded).max())
        self._in_heads = self._in_waiting = self._appended

    def launch(self, batch: ObservationBatch) -> None:
        """Rebuild a batch of observations."""
        if self._index_is_stale:  # an error came before it could be sent
            self._send_index()
        places, ends, outs, fields = batch
        key = places.n, places.envs_at, len(outs), fields is None
        sources = self.tensors, places.numbers, ends[0], ends[-1], fields and fields.fields
        known = self._launches.get(key)
        if known is None or not all(map(is_, known[0], sources)):
            if known is not None or len(self._launches) == _MOST_LAUNCHES:
                self._launches.clear()  # they keep outgrown tensors alive
            known = self._launches[key] = sources, self.codec.gather_launch(self.tensors, batch)
        known[1](batch.outputs)

    def gather(self, lanes: Indices, firsts: Indices, outs: list[Bytes]) -> None:
        """Gather frames for the host, which waits for them. Training batches use :meth:`launch` instead."""
        n, stack = len(lanes), self.layout.stack
        if not n:
            return
        places = Places([np.arange(n)], lanes, self.device)
        for first, out in zip(firsts, outs, strict=True):
            ends = np.repeat((first + stack).astype(np.uint32).view(np.int32)[:, None], self.n_lanes, axis=1)
            found = th.empty((n, stack * self.codec.frame.nbytes), dtype=th.uint8, device=self.device)
            self.launch(ObservationBatch(places, [upload(ends, self.device)], [found]))
            out[...] = found.cpu().numpy().reshape(out.shape)

    @property
    def reference_bytes(self) -> int:
        return self.codec.reference_bytes + self.tensors.ring.nbytes

    def device_tensors(self) -> list[th.Tensor]:
        """Everything on the device that kernels read or write."""
        tensors = [tensor for tensor in self.tensors if isinstance(tensor, th.Tensor)]
        return [self._all_lanes, *self.staging.tensors, *tensors]

    def check(self) -> None:
        super().check()
        check_records(self)
        if not self._index_is_stale:
            check_device_copy(self)

    def state(self) -> State:
        self.settle()
        if isinstance(self.codec, DeviceDelta):
            self.codec.fetch_references(self.tensors.table)
        lanes, places = self._waiting_places()
        waiting = self.tensors.ring.cpu().numpy()[lanes, places]
        return {**super().state(), "waiting": waiting}

    def restore(self, state: SavedState) -> None:
        super().restore(state)
        self.newest.forget()
        check_records(self)  # because kernels do not validate what they read
        waiting = self.ring[self._waiting_places()]
        self._create_tensors(fewest=int((self.heads - self.encoded).max()) + 4 * self.layout.stack)
        if len(waiting):
            lanes, places = self._waiting_places()
            rows = upload(lanes * self.tensors.ring_frames + places, self.device)
            self.tensors.ring.view(-1, waiting.shape[1]).index_copy_(0, rows, upload(waiting, self.device))

    def _create_tensors(self, fewest: int = 0) -> None:
        """Create all tensors on the device from the state of the host.

        :param fewest: The fewest frames for which the ring must have room.
        """
        group, stack, frame_bytes = self.codec.frames_per_record, self.layout.stack, self.codec.frame.nbytes
        # A step may append two whole observations, and steps go on while the records in the ring are measured.
        affordable = _RING_BYTES // (self.n_lanes * frame_bytes)
        n_frames = max(6 * stack + group, min(_RING_FRAMES, affordable), fewest)
        n_frames = -(-n_frames // group) * group
        # The base class only needs the shape of the ring. The host's ring has that of the device's, but no bytes.
        self.ring = np.empty((self.n_lanes, n_frames, 0), dtype=np.uint8)
        self._all_lanes = upload(np.arange(self.n_lanes), self.device)
        self.staging.forget()
        self._table_memory = DeviceMemory(self.device)
        self._index_is_stale = True

        self._orders = Staging(3 * self.n_lanes, th.int64, self.device)
        self._progress = Progress(self.n_lanes, self.device)
        tensors = DeviceFrames.zeros(self.n_lanes, n_frames, frame_bytes, group, stack, self.device)
        self.tensors = tensors._replace(heap=self.arena.heap, orders=self._orders.sent)
        copy_into(self.tensors.heads, self.heads)
        self._report = Report(self.tensors.report)
        if isinstance(self.codec, DeviceDelta):
            frames = self.codec.reference_frames.view(np.int32)
            self._grow_table(len(frames))
            copy_into(self.tensors.table[: len(frames)], frames)
        self._send_index()

    def _send_index(self) -> None:
        """Send the whole index if records have moved or it has grown. Kernels enter new records themselves."""
        if not self._index_is_stale:
            return
        index = self.index
        records = np.empty((*index.starts.shape, 2), dtype=np.int64)
        records[..., 0] = index.starts
        records[..., 1] = index.lengths.astype(np.int64) | index.references.astype(np.int64) << LENGTH_BITS
        if self.tensors.records.shape == records.shape:
            copy_into(self.tensors.records, records)
        else:
            self.tensors = self.tensors._replace(records=upload(records, self.device))
        copy_into(self.tensors.encoded, self.encoded)
        if isinstance(self.codec, DeviceDelta):
            copy_into(self.tensors.references, self.codec.references_for(self.n_lanes))
        self._index_is_stale = False

    def _grow_table(self, size: int) -> None:
        """Make room for ``size`` reference frames."""
        n_rows, n_words = self.tensors.table.shape
        if n_rows < size:
            larger = max(size + 16, n_rows * 65 // 64)
            self._table_memory.grow(4 * larger * n_words)
            table = self._table_memory.bytes.view(th.int32).view(larger, n_words)
            table[n_rows:] = 0
            self.tensors = self.tensors._replace(table=table)
