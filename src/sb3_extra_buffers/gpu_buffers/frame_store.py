"""Frames on a torch device: a ring of new ones, and records of the others.

The device compares observations with those before, keeps new frames in a ring and measures the records that they would
make. Every few dozen steps, heads, lengths and the oldest frames in use are copied to the host in the background: a
:class:`~sb3_extra_buffers.gpu_buffers.transfer.Report`, which is read some steps later. Then the host, which keeps
account of all records as in host memory, finds room for them and has the device write them. Until then, frames are
sampled from the ring. The host waits only where it is so far ahead of the device that the ring could overflow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.errors import CapacityError
from sb3_extra_buffers.gpu_buffers.arena import CappedFrameStore, DeviceArena, HeapBudget, RawBuffer
from sb3_extra_buffers.gpu_buffers.device_codecs import DeviceCodec, DeviceDelta, newest_frames
from sb3_extra_buffers.gpu_buffers.kernels import LENGTH_BITS, DeviceFrames, ObservationBatch, kernel_module
from sb3_extra_buffers.gpu_buffers.record_validation import check_device_copy, check_records
from sb3_extra_buffers.gpu_buffers.transfer import Report, copy_into, pinned, to_device, upload
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.frame_store import FrameStore, numbers_from
from sb3_extra_buffers.storage.stacking import MemoryForm, StackLayout

_RING_FRAMES = 4096
_RING_BYTES = 32 << 20
"""The size of the ring of all lanes together. It is larger where one step needs more."""
_ALIGNMENT = 16
"""Kernels are compiled for tensors that begin at a multiple of this."""
_SIGN = -(1 << 31)


class DeviceFrameStore(CappedFrameStore):
    """A frame store on ``device``. On the host, ``heads`` are as of the last report."""

    codec: DeviceCodec
    arena: DeviceArena
    tensors: DeviceFrames
    """The tensors that kernels read and write."""

    def __init__(self, codec: DeviceCodec, n_lanes: int, layout: StackLayout, device: th.device, budget: HeapBudget):
        super().__init__(codec, n_lanes, layout, DeviceArena(device, budget))
        self.device = device
        self._report: Report | None = None
        self._references = np.zeros(n_lanes, dtype=np.int64)
        """The reference of each lane when the report was requested."""
        self._in_report = 0
        """Observations of each lane whose new frames the report will count."""
        self._since_report = 0
        """Observations of each lane that arrived later."""
        self._create_tensors()

    # Appending

    def reserve(self, n_observations: int, ends: Sequence[th.Tensor]) -> None:
        """Make room for so many observations of each lane. All that can fail happens here, before anything is stored.

        :param ends: Where the observations of all columns end. Frames that none of them needs are released.
        """
        n_frames, ring_frames = n_observations * self.layout.stack, self.tensors.ring_frames
        if self._report is not None and self._report.has_arrived:
            with contextlib.suppress(CapacityError):  # frames for which there is no room go on waiting
                self._place_records()
        if self._report is None and self._most_in_ring + n_frames > ring_frames // 4:
            self._request_report(ends)
        while self._most_in_ring + n_frames > ring_frames:
            if self._report is None:
                self._request_report(ends)
            try:
                self._place_records()
            except CapacityError:
                if not self._since_report:
                    raise
                self._request_report(ends)  # less may be in use by now

    def make_room(self, n_observations: int, oldest: Callable[[], Indices]) -> None:
        self.reserve(n_observations, [])

    def append(self, lanes: Indices, observations: npt.NDArray[Any], oldest: Callable[[], Indices]) -> Indices:
        """Append from the host, which waits for the result. Nothing is released."""
        self.reserve(1, [])
        ends = th.zeros((1, self.n_lanes), dtype=th.int32, device=self.device)
        self.append_on_device(self.send([observations]), [ends], [0], lanes)
        found: Indices = ends.cpu().numpy().view(np.uint32)[0, lanes].astype(np.int64)
        return found

    def append_on_device(
        self, observations: list[th.Tensor], ends: list[th.Tensor], slots: list[int], lanes: Indices | None = None
    ) -> None:
        """Append what :meth:`send` or :meth:`cut` returned, for which there is room; see :mod:`.kernels.append`."""
        self._since_report += len(observations)
        which = self._all_lanes if lanes is None else upload(lanes, self.device)
        kernel_module("append").append_observations(self.tensors, which, observations, ends, slots)

    def send(self, observations: Sequence[npt.NDArray[Any]]) -> list[th.Tensor]:
        """Observations on the host as frames on the device, (n, stack, frame_bytes).

        They cross the bus in one piece, as they lie in memory: the device transposes faster.
        """
        memories = [self.layout.in_memory(part) for part in observations]
        form = memories[0][1]
        if any(other != form for _, other in memories):
            memories = [self.layout.in_memory(np.ascontiguousarray(part)) for part in observations]
            form = memories[0][1]
        staged = pinned((len(memories), *memories[0][0].shape), th.uint8, self.device)
        for row, (memory, _) in zip(staged.numpy(), memories, strict=True):
            row[...] = memory
        return [_aligned(part) for part in self._frames_of(to_device(staged, self.device), form).unbind(0)]

    def _frames_of(self, memory: th.Tensor, form: MemoryForm) -> th.Tensor:
        """Observations, (parts, n, bytes), that lie in memory as ``form`` says, as (parts, n, stack, frame_bytes)."""
        pixels, chunk, item = form
        shape = (*memory.shape[:2], self.layout.stack, self.codec.frame.nbytes)
        if pixels == 1:
            return memory.view(shape)
        values = memory.view(*memory.shape[:2], pixels, self.layout.stack, chunk // item, item)
        return values.permute(0, 1, 3, 4, 2, 5).contiguous().view(shape)

    def cut(self, observations: th.Tensor) -> th.Tensor:
        """Observations on the device as frames, (n, stack, frame_bytes)."""
        n, stack = len(observations), self.layout.stack
        if not self.layout.is_contiguous:
            channels = self.layout.shape[-1] // stack
            observations = observations.reshape(n, -1, stack, channels).transpose(1, 2)
        return _aligned(observations.contiguous().view(n, -1).view(th.uint8).view(n, stack, -1))

    # Encoding

    @property
    def _most_in_ring(self) -> int:
        """An upper bound for the frames of a lane that are in the ring and in no record."""
        return int((self.heads - self.encoded).max()) + self.layout.stack * (self._in_report + self._since_report)

    def _request_report(self, ends: Sequence[th.Tensor]) -> None:
        """Request a report: the lengths of all complete records, measured on the device."""
        if isinstance(self.codec, DeviceDelta):
            self._renew_references(self.codec, np.flatnonzero(self.codec.references_for(self.n_lanes) == 0))
            self._references = self.codec.references_for(self.n_lanes)
        tensors = self.tensors
        n_records = max(min(self._most_in_ring, tensors.ring_frames) // tensors.group, 1)
        measured = self.codec.measure(tensors, upload(self._references, self.device), n_records)
        oldest = _oldest_frames(ends, self.layout.stack) if ends else th.zeros_like(tensors.heads)
        self._report = Report(th.cat([tensors.heads[:, None], oldest[:, None], measured], dim=1))
        self._in_report, self._since_report = self._in_report + self._since_report, 0

    def _place_records(self) -> None:
        """Wait for the report, allocate room for its records, and let the device write them."""
        assert self._report is not None
        rows: Indices = self._report.wait()
        np.maximum(self.heads, rows[:, 0], out=self.heads)
        oldest, saved, all_lengths = rows[:, 1], rows[:, 2], rows[:, 3:]
        counts = np.count_nonzero(all_lengths, axis=1)
        if counts.any():
            lanes, numbers = numbers_from(self.encoded // self.codec.frames_per_record, counts)
            lengths = all_lengths[all_lengths > 0]
            self._make_index_room(counts, oldest)
            start = self.allocate(int(lengths.sum()), lambda: oldest)
            self._write_records(lanes, numbers, start + np.cumsum(lengths) - lengths, lengths)
        else:
            self._report, self._in_report = None, 0
        if isinstance(self.codec, DeviceDelta):
            self._renew_references(self.codec, self.codec.lanes_to_renew(saved, counts))

    def _write_records(self, lanes: Indices, numbers: Indices, starts: Indices, lengths: Indices) -> None:
        group, capacity, references = self.codec.frames_per_record, self.starts.shape[1], self._references[lanes]
        places = lanes * capacity + numbers % capacity
        encoded = self.encoded + group * np.bincount(lanes, minlength=self.n_lanes)
        entries = _packed(lengths, references)
        jobs = upload(np.stack([lanes, numbers * group, starts, entries, places]), self.device)
        self._index_is_stale = True  # if anything fails before the host's numbers agree with the device's
        self.codec.write(self.tensors, jobs)
        self.tensors.records.view(-1, 2).index_copy_(0, jobs[4], jobs[2:4].t().contiguous())
        copy_into(self.tensors.encoded, encoded)
        # Nothing can fail from here on. The records exist once ``encoded`` says so. With the report, they would be
        # entered twice.
        with uninterrupted():
            self._report, self._in_report = None, 0
            self.starts.reshape(-1)[places] = starts
            self.lengths.reshape(-1)[places] = lengths
            if isinstance(self.codec, DeviceDelta):
                self._has_references = True
                self.references.reshape(-1)[places] = references
                self.codec.incref(references)
            self._bytes_encoded += int(lengths.sum())
            self._frames_encoded += group * len(lanes)
            self.encoded = encoded
            self._index_is_stale = False

    def _renew_references(self, codec: DeviceDelta, lanes: Indices) -> None:
        """Make the newest frames of lanes their references."""
        if len(lanes):
            self._grow_table(codec.most_references(len(lanes)))
            frames = newest_frames(self.tensors)[upload(lanes, self.device)]
            self.tensors.table.index_copy_(0, upload(codec.renew(lanes), self.device), frames)

    def _make_index_room(self, counts: Indices, oldest: Indices) -> None:
        def missing(spare: int = 0) -> int:
            records = self.encoded // self.codec.frames_per_record - self.first_records
            return int((records + counts).max()) + 1 + spare - self.starts.shape[1]

        if missing() > 0:
            self.release(oldest)
            while missing(self.starts.shape[1] // 16) > 0:
                self._index_is_stale = True
                self._grow_index()
            self._send_index()

    def allocate(self, size: int, oldest: Callable[[], Indices]) -> int:
        generation, capacity = self.arena.generation, self.starts.shape[1]
        try:
            return super().allocate(size, oldest)
        finally:
            if self.tensors.heap is not self.arena.heap:
                self.tensors = self.tensors._replace(heap=self.arena.heap)
                self.arena.return_old_memory()
            if generation != self.arena.generation or capacity != self.starts.shape[1]:
                self._index_is_stale = True
            self._send_index()

    def _grow_index(self) -> None:
        with uninterrupted():  # its parts have one size
            super()._grow_index()

    def release(self, oldest: Indices) -> None:
        # The next observation may share frames with the newest one.
        with uninterrupted():
            super().release(np.minimum(oldest, self.heads - self.layout.stack))

    def clear(self) -> None:
        with uninterrupted():
            FrameStore.release(self, self.encoded)
            self.heads = self.heads + self.layout.stack * (self._in_report + self._since_report)
            super().clear()
            self.send_numbers()
            self.tensors.known.zero_()

    # Between host and device

    def fetch_heads(self) -> None:
        """Wait for the device, and copy the numbers of frames to the host."""
        self.heads[:] = self.tensors.heads.cpu().numpy()
        self._in_report = self._since_report = 0

    def settle(self) -> None:
        """Wait for the device, and encode all complete records, as far as there is room."""
        self.fetch_heads()
        with contextlib.suppress(CapacityError):
            while self._report is not None or (self.heads - self.encoded >= self.codec.frames_per_record).any():
                if self._report is None:
                    self._request_report([])
                self._place_records()

    def send_numbers(self) -> None:
        """Send the numbers of frames, which the host has changed, to the device. Pending reports are void."""
        copy_into(self.tensors.heads, self.heads)
        copy_into(self.tensors.encoded, self.encoded)
        self._report, self._in_report, self._since_report = None, 0, 0

    def launch(self, batch: ObservationBatch) -> None:
        """Rebuild a batch of observations."""
        if self._index_is_stale:  # something failed before it was sent
            self._send_index()
        self.codec.gather(self.tensors, batch)

    def gather(self, lanes: Indices, firsts: Indices, outs: list[Bytes]) -> None:
        """Gather frames for the host, which waits for them. Training batches go through :meth:`launch`."""
        n, stack = len(lanes), self.layout.stack
        if not n:
            return
        places = upload(np.stack([np.arange(n), lanes]), self.device)
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
        return [self._all_lanes, *(tensor for tensor in self.tensors if isinstance(tensor, th.Tensor))]

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
        check_records(self)  # kernels do not look whether what they read makes sense
        lanes, numbers = numbers_from(self.encoded, self.heads - self.encoded)
        waiting = self.ring[self._waiting_places()]
        self._create_tensors(fewest=int((self.heads - self.encoded).max()) + 4 * self.layout.stack)
        if len(lanes):
            rows = upload(lanes * self.tensors.ring_frames + numbers % self.tensors.ring_frames, self.device)
            self.tensors.ring.view(-1, waiting.shape[1]).index_copy_(0, rows, upload(waiting, self.device))

    def _create_tensors(self, fewest: int = 0) -> None:
        """Create all tensors on the device from the state of the host.

        :param fewest: How many frames the ring must hold at least.
        """
        group, stack, frame_bytes = self.codec.frames_per_record, self.layout.stack, self.codec.frame.nbytes
        # A step may bring two whole observations. While the records of a part of the ring are measured, frames go to
        # the rest of it.
        affordable = min(_RING_FRAMES, _RING_BYTES // frame_bytes) // self.n_lanes
        n_frames = max(6 * stack + group, affordable, fewest)
        n_frames = -(-n_frames // group) * group
        # The host's ring has the shape of the device's, but no frames.
        self.ring = np.empty((self.n_lanes, n_frames, 0), dtype=np.uint8)
        self._all_lanes = upload(np.arange(self.n_lanes), self.device)
        self._index_memory = self._table_memory = RawBuffer(0, self.device)
        self._index_is_stale = True

        def zeros(*shape: int, dtype: th.dtype) -> th.Tensor:
            return th.zeros(shape, dtype=dtype, device=self.device)

        self.tensors = DeviceFrames(
            heap=self.arena.heap,
            records=zeros(self.n_lanes, 0, 2, dtype=th.int64),
            table=zeros(0, -(-frame_bytes // 4), dtype=th.int32),
            ring=zeros(self.n_lanes, n_frames, frame_bytes, dtype=th.uint8),
            headers=zeros(self.n_lanes, n_frames, dtype=th.int32),
            heads=upload(self.heads, self.device),
            known=zeros(self.n_lanes, dtype=th.int32),
            encoded=upload(self.encoded, self.device),
            group=group,
            stack=stack,
        )
        self._send_index()
        if isinstance(self.codec, DeviceDelta):
            frames = self.codec.reference_frames.view(np.int32)
            self._grow_table(len(frames))
            copy_into(self.tensors.table[: len(frames)], frames)

    def _send_index(self) -> None:
        """Send the whole index if records have moved or it has grown. Entries of new records are sent with these."""
        if not self._index_is_stale:
            return
        index = np.empty((*self.starts.shape, 2), dtype=np.int64)
        index[..., 0] = self.starts
        index[..., 1] = _packed(self.lengths, self.references)
        memory = self._index_memory
        if len(memory) != index.nbytes:
            memory = RawBuffer(index.nbytes, self.device)
        records = memory.bytes.view(th.int64).view(index.shape)
        copy_into(records, index)
        copy_into(self.tensors.encoded, self.encoded)
        self.tensors = self.tensors._replace(records=records)
        self._index_memory, self._index_is_stale = memory, False

    def _grow_table(self, size: int) -> None:
        """Make room for so many reference frames."""
        table = self.tensors.table
        if len(table) < size:
            shape = (max(size, len(table) * 9 // 8), table.shape[1])
            memory = RawBuffer(4 * shape[0] * shape[1], self.device)
            larger = memory.bytes.view(th.int32).view(shape)
            larger[: len(table)] = table
            larger[len(table) :] = 0
            self.tensors = self.tensors._replace(table=larger)
            del table
            self._table_memory = memory


def _packed(lengths: npt.NDArray[Any], references: npt.NDArray[Any]) -> Indices:
    """Lengths and references as the second number of index entries."""
    return lengths.astype(np.int64) | references.astype(np.int64) << LENGTH_BITS


def _aligned(tensor: th.Tensor) -> th.Tensor:
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def _oldest_frames(ends: Sequence[th.Tensor], stack: int) -> th.Tensor:
    """The oldest frame of each lane that an observation needs. ``ends`` hold ``uint32``, 0 where there is none."""
    # Less one, so that 0 becomes the largest number instead of the smallest; torch compares signed numbers.
    smallest = th.stack([(column - 1).bitwise_xor_(_SIGN).amin(0) for column in ends]).amin(0)
    return (smallest.bitwise_xor_(_SIGN).to(th.int64) & 0xFFFFFFFF) + 1 - stack
