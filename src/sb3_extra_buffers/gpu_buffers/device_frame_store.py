"""Frames whose records lie on a torch device.

The host decides: it compares observations, encodes new frames and knows where each record is. The device holds the
records, and a copy of everything that it takes to rebuild a frame from a slot and an environment: index, reference
frames and waiting frames. :meth:`DeviceFrameStore.flush` brings that copy up to date.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Bytes, Codec, Indices
from sb3_extra_buffers.codecs.rle import RleCodec
from sb3_extra_buffers.codecs.zstd import ZstdCodec
from sb3_extra_buffers.errors import CapacityError
from sb3_extra_buffers.gpu_buffers import kernels, nvcomp
from sb3_extra_buffers.gpu_buffers.delta_codec import BatchDeltaCodec
from sb3_extra_buffers.gpu_buffers.device_arena import DeviceArena, HeapBudget
from sb3_extra_buffers.gpu_buffers.kernels.batch import ObservationBatch
from sb3_extra_buffers.gpu_buffers.kernels.delta_torch import decode_delta_torch
from sb3_extra_buffers.gpu_buffers.kernels.frames import LENGTH_BITS, DeviceFrames, Hints
from sb3_extra_buffers.gpu_buffers.kernels.rle_torch import decode_rle_torch
from sb3_extra_buffers.gpu_buffers.kernels.zstd_nvcomp import decode_zstd_nvcomp
from sb3_extra_buffers.gpu_buffers.raw_buffer import RawBuffer
from sb3_extra_buffers.gpu_buffers.record_decoding import decode_plan, plan_records
from sb3_extra_buffers.gpu_buffers.record_validation import check_records
from sb3_extra_buffers.gpu_buffers.transfer import Outbox, copy_into, upload
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import SavedState
from sb3_extra_buffers.storage.frame_store import FrameStore, numbers_from
from sb3_extra_buffers.storage.stacking import StackLayout

_WAITING_STEPS = 24
_WAITING_BYTES = 4 << 20


class DeviceFrameStore(FrameStore):
    """A frame store with its records on ``device``.

    New frames wait on the host until some steps' worth of them can be encoded together, or a batch is to be sampled.
    """

    arena: DeviceArena
    _copy: DeviceFrames

    def __init__(self, codec: Codec, n_lanes: int, layout: StackLayout, device: th.device, budget: HeapBudget) -> None:
        super().__init__(codec, n_lanes, layout)
        self.arena = DeviceArena(device, budget, slack=codec.record_bytes)
        # Room for a step, which may bring two whole observations, beside an unfinished record.
        group, frame_bytes = codec.frames_per_record, codec.frame.nbytes
        fewest = 2 * layout.stack + group - 1
        ring_frames = max(fewest, min(fewest + _WAITING_STEPS, _WAITING_BYTES // (n_lanes * frame_bytes)))
        self.ring = np.zeros((n_lanes, -(-ring_frames // group) * group, frame_bytes), dtype=np.uint8)
        self._most_waiting = 0
        """In any lane; at least as many as there are."""
        self._any_raw = False
        """Whether there may be a raw record."""
        self._forget_copy()

    @property
    def device(self) -> th.device:
        return self.arena.device

    def to(self, device: th.device) -> None:
        self.arena.to(device)
        self._forget_copy()

    def append(self, lanes: Indices, observations: npt.NDArray[Any], oldest: Callable[[], Indices]) -> Indices:
        self.make_room(1, oldest)
        memory, form = self.layout.in_memory(observations)
        (ends,) = self._append(lanes, (memory,), form)
        self._changed = True
        return ends

    def make_room(self, n_observations: int, oldest: Callable[[], Indices]) -> None:
        """For so many observations per lane. All that can fail happens here, before anything is stored."""
        if self._most_waiting + n_observations * self.layout.stack > self.ring.shape[1]:
            self._encode_waiting(oldest)

    def encode_waiting(self, oldest: Callable[[], Indices]) -> None:
        """Encode what can be encoded now. Frames for which there is no room go on waiting."""
        with contextlib.suppress(CapacityError):
            self._encode_waiting(oldest)

    def clear(self) -> None:
        with uninterrupted():
            super().clear()
            self._most_waiting = 0
            self._any_raw = False
            self._changed = True

    def release(self, oldest: Indices) -> None:
        with uninterrupted():  # what records refer to, and which records there are
            super().release(oldest)

    def gather(self, lanes: Indices, firsts: Indices, outs: list[Bytes]) -> None:
        """For the host, which waits for it. Batches for training are gathered by the observation store."""
        with Outbox(self.device) as outbox:
            self.flush(outbox)
        device_lanes = upload(lanes, self.device)
        for first, out in zip(firsts, outs, strict=True):
            found = self.decode(device_lanes, upload(first, self.device), self.hints(lanes, first[None]))
            out[:] = found.cpu().numpy().reshape(out.shape)

    def hints(self, lanes: Indices, firsts: Indices) -> Hints:
        """What is to be known in advance about the frames of observations that begin at ``firsts``."""
        group, steps = self.codec.frames_per_record, np.arange(self.layout.stack)
        numbers = (firsts[:, :, None] + steps).reshape(len(firsts), -1)
        all_lanes = np.repeat(lanes, len(steps))
        in_record = (numbers >= 0) & (numbers < self.encoded[all_lanes])
        lengths = self.lengths[all_lanes, numbers // group % self.starts.shape[1]]
        encoded = in_record & (lengths != self.codec.record_bytes)
        return Hints(
            int(lengths[encoded].max(initial=0)),
            bool((in_record & ~encoded).any()),
            bool((numbers >= self.encoded[all_lanes]).any()),
            bool((numbers < 0).any()),
        )

    def decode(self, lanes: th.Tensor, firsts: th.Tensor, hints: Hints) -> th.Tensor:
        """The observations that begin at ``firsts``, ``(n, stack, frame_bytes)``, by plain torch operations."""
        frames, steps = self.copy, th.arange(self.layout.stack, device=self.device)
        numbers = (firsts[:, None] + steps).reshape(-1)
        all_lanes = lanes[:, None].expand(-1, len(steps)).reshape(-1)
        if isinstance(self.codec, BatchDeltaCodec):
            decoded = decode_delta_torch(frames, hints, all_lanes, numbers)
        elif isinstance(self.codec, RleCodec):
            sizes = self.codec.runs_type.itemsize, self.codec.element_type.itemsize
            decoded = decode_rle_torch(frames, hints, all_lanes, numbers, *sizes)
        elif self.decodes_zstd and hints.all_compressed:
            decoded = decode_zstd_nvcomp(frames, all_lanes, numbers)
        else:
            return self.decode_records(lanes.cpu().numpy(), firsts.cpu().numpy()[None])[0]
        return decoded.reshape(-1, self.layout.stack, frames.frame_bytes)

    @property
    def decodes_zstd(self) -> bool:
        """Whether the records are ``zstd``, and decoded by the device."""
        return isinstance(self.codec, ZstdCodec) and nvcomp.is_available(self.device)

    @property
    def has_kernel(self) -> bool:
        """Whether there is a kernel that rebuilds whole batches."""
        by_kernel = isinstance(self.codec, BatchDeltaCodec | RleCodec) or self.decodes_zstd
        return by_kernel and kernels.uses_triton(self.device)

    def all_compressed(self, lanes: Indices, firsts: Indices) -> bool:
        """Whether all frames of the observations that begin at ``firsts`` are in records that are not raw."""
        if not self._any_raw and np.array_equal(self.heads, self.encoded):
            return int(firsts.min(initial=0)) >= 0
        return self.hints(lanes, firsts).all_compressed

    def launch(self, batch: ObservationBatch) -> None:
        """Rebuild observations with a kernel that does the whole batch. Those of ``zstd`` must be compressed."""
        if self.decodes_zstd:
            from sb3_extra_buffers.gpu_buffers.kernels.zstd_triton import gather_zstd

            gather_zstd(self.copy, batch)
        elif isinstance(self.codec, RleCodec):
            from sb3_extra_buffers.gpu_buffers.kernels.rle_triton import gather_rle

            gather_rle(self.copy, batch, self.codec.runs_type.itemsize, self.codec.element_type.itemsize)
        else:
            from sb3_extra_buffers.gpu_buffers.kernels.delta_triton import gather_delta

            gather_delta(self.copy, batch)

    def decode_records(self, lanes: Indices, firsts: Indices) -> list[th.Tensor]:
        """The same for records that are decoded whole."""
        plan = plan_records(self, lanes, firsts)
        return list(decode_plan(plan, self.codec, self.copy.heap).unbind(1))

    def restore(self, state: SavedState) -> None:
        super().restore(state)
        check_records(self, on_device=True)  # kernels do not look whether what they read makes sense
        self._most_waiting = int((self.heads - self.encoded).max())
        self._any_raw = bool((self.lengths == self.codec.record_bytes).any())
        self._forget_copy()

    # The device's copy

    @property
    def device_bytes(self) -> int:
        """Memory on the device, whether in use or not."""
        return sum(tensor.nbytes for tensor in self.device_tensors())

    def device_tensors(self) -> list[th.Tensor]:
        """Everything on the device that kernels read."""
        return [tensor for tensor in self._copy if isinstance(tensor, th.Tensor)]

    @property
    def copy(self) -> DeviceFrames:
        """What kernels read; as of the last :meth:`flush`."""
        return self._copy

    @property
    def has_changed(self) -> bool:
        """Whether there is something to :meth:`flush`."""
        return self._changed

    def flush(self, outbox: Outbox) -> None:
        """Bring the device up to date, without waiting for it."""
        if not self._changed:
            return
        self.arena.flush(outbox)
        self._copy_index(outbox)
        if isinstance(self.codec, BatchDeltaCodec):
            self._copy_references(self.codec, outbox)
        self._copy_waiting(outbox)
        self._read_new_heap()
        outbox.when_sent(self._all_sent)

    def _all_sent(self) -> None:
        self._changed = False

    def _read_new_heap(self) -> None:
        if self._copy.heap is not self.arena.heap:
            self._copy = self._copy._replace(heap=self.arena.heap)
        self.arena.return_old_memory()

    def _encode_waiting(self, oldest: Callable[[], Indices]) -> None:
        """Encode all complete records of all lanes at once."""
        group = self.codec.frames_per_record
        counts = (self.heads - self.encoded) // group
        if not counts.any():
            return
        lanes, numbers = numbers_from(self.encoded // group, counts)
        positions = numbers * group % self.ring.shape[1]
        frames = self.ring[lanes[:, None], positions[:, None] + np.arange(group)]
        data, lengths, references = self.codec.encode(frames.reshape(len(lanes), -1), lanes)
        encoded_before = self.encoded
        try:
            starts = self._room_for(counts, lengths, oldest)
            self.arena.write(int(starts[0]), data)
            self._enter(counts, lanes, numbers, starts, lengths, references)
        except BaseException:
            if self.encoded is encoded_before:
                self.codec.release(references)
            raise
        self._most_waiting = int((self.heads - self.encoded).max())

    def _room_for(self, counts: Indices, lengths: Indices, oldest: Callable[[], Indices]) -> Indices:
        """Find room for records, ``counts`` for each lane. Returns where they start, one after the other."""
        self._make_index_room(counts, oldest)
        starts: Indices = self.allocate(int(lengths.sum()), oldest) + np.cumsum(lengths) - lengths
        return starts

    def _enter(
        self, counts: Indices, lanes: Indices, numbers: Indices, starts: Indices, lengths: Indices, references: Indices
    ) -> None:
        """Enter records that have been written into the index. They are there once ``encoded`` says so, not before."""
        group = self.codec.frames_per_record
        places = lanes * self.starts.shape[1] + numbers % self.starts.shape[1]
        self.starts.reshape(-1)[places] = starts
        self.lengths.reshape(-1)[places] = lengths
        self._has_references = True
        self.references.reshape(-1)[places] = references
        self._any_raw = self._any_raw or int(lengths.max()) == self.codec.record_bytes
        self._bytes_encoded += int(lengths.sum())
        self._frames_encoded += group * len(lanes)
        self._changed = True
        self.encoded = self.encoded + counts * group

    def allocate(self, size: int, oldest: Callable[[], Indices]) -> int:
        if not self._index_is_full():
            start = self.arena.allocate(size)
            if start is not None:
                return start
        with uninterrupted():  # records that move and the index that tells where they are change together
            try:
                return super().allocate(size, oldest)
            except CapacityError:
                if not self._close_gaps(size):
                    raise
                return super().allocate(size, oldest)
            finally:
                self._read_new_heap()

    def _close_gaps(self, size: int) -> bool:
        """Make room by moving live records together, if that gives ``size`` bytes; says whether it did.

        Gaps come about where lanes differ: one whose picture never changes keeps its records, and all that other lanes
        wrote after them.
        """
        counts = self.encoded // self.codec.frames_per_record - self.first_records
        lanes, numbers = numbers_from(self.first_records, counts)
        places = lanes * self.starts.shape[1] + numbers % self.starts.shape[1]
        starts, lengths = self.starts.reshape(-1)[places], self.lengths.reshape(-1)[places].astype(np.int64)
        # What is gained must last for a while: moving everything takes time.
        if self.arena.live_bytes - int(lengths.sum()) < max(size, self.arena.limit // 16):
            return False
        order = np.argsort(self.arena.distance(starts), kind="stable")
        self.arena.close_gaps(starts[order], lengths[order])
        self.starts.reshape(-1)[places[order]] = np.cumsum(lengths[order]) - lengths[order]
        self._changed = True
        return True

    def _waiting_frames(self) -> tuple[Indices, Indices]:
        """The lanes and numbers of all frames that are in no record."""
        return numbers_from(self.encoded, self.heads - self.encoded)

    def _make_index_room(self, counts: Indices, oldest: Callable[[], Indices]) -> None:
        def missing(spare: int = 0) -> int:
            records = self.encoded // self.codec.frames_per_record - self.first_records
            return int((records + counts).max()) + 1 + spare - self.starts.shape[1]

        if missing() > 0:
            self.release(oldest())
            # Looking for the oldest frame costs time, so there is to be some room before it must be done again.
            while missing(self.starts.shape[1] // 16) > 0:
                self._grow_index()

    def _grow_index(self) -> None:
        with uninterrupted():  # its parts have one size
            super()._grow_index()

    def _forget_copy(self) -> None:
        self._copied_generation = -1
        self._index_memory = self._table_memory = RawBuffer(0, self.device)
        self._copied_records = np.zeros(self.n_lanes, dtype=np.int64)
        self._changed = True
        if isinstance(self.codec, BatchDeltaCodec):
            self.codec.none_sent()
        self._copy = DeviceFrames.empty(
            self.arena.heap, self.ring.shape, self.codec.frames_per_record, self.layout.stack
        )

    def _copy_index(self, outbox: Outbox) -> None:
        capacity = self.starts.shape[1]
        last = self.encoded // self.codec.frames_per_record
        if self._copy.records.shape[1] != capacity or self._copied_generation != self.arena.generation:
            index = np.empty((self.n_lanes, capacity, 2), dtype=np.int64)
            index[..., 0] = self.starts
            index[..., 1] = packed_entries(self.lengths, self.references)
            memory = RawBuffer(index.nbytes, self.device)
            records = memory.bytes.view(th.int64).view(index.shape)
            copy_into(records, index)
            self._copy = self._copy._replace(records=records)
            self._index_memory = memory
            self._copied_generation = self.arena.generation
        else:
            # Lanes may have been cleared, or may have gone round since the last time.
            first = np.maximum(self._copied_records, last - capacity)
            lanes, numbers = numbers_from(first, last - first)
            if len(lanes):
                places = lanes * capacity + numbers % capacity
                entries = np.empty((len(lanes), 2), dtype=np.int64)
                entries[:, 0] = self.starts.reshape(-1)[places]
                entries[:, 1] = packed_entries(self.lengths.reshape(-1)[places], self.references.reshape(-1)[places])
                outbox.put_rows(self._copy.records.view(-1, 2), places, entries)
        outbox.when_sent(functools.partial(self._index_sent, last))

    def _index_sent(self, last: Indices) -> None:
        self._copied_records = last

    def _copy_references(self, codec: BatchDeltaCodec, outbox: Outbox) -> None:
        numbers = codec.unsent_references()
        if len(numbers):
            self._grow_table(len(codec.reference_frames))
            outbox.put_rows(self._copy.table, numbers, codec.reference_frames[numbers].view(np.int32))
            outbox.when_sent(codec.all_sent)

    def _grow_table(self, size: int) -> None:
        table = self._copy.table
        if len(table) < size:
            shape = (max(size, len(table) * 9 // 8), table.shape[1])
            memory = RawBuffer(4 * shape[0] * shape[1], self.device)
            larger = memory.bytes.view(th.int32).view(shape)
            larger[: len(table)] = table
            larger[len(table) :] = 0
            self._copy = self._copy._replace(table=larger)
            del table
            self._table_memory = memory

    def _copy_waiting(self, outbox: Outbox) -> None:
        lanes, numbers = self._waiting_frames()
        if len(lanes):
            positions = numbers % self.ring.shape[1]
            places = lanes * self.ring.shape[1] + positions
            outbox.put_rows(self._copy.ring.view(-1, self.ring.shape[2]), places, self.ring[lanes, positions])
            outbox.put(self._copy.encoded, 0, self.encoded)
        if self._copy.any_waiting != (len(lanes) > 0):
            self._copy = self._copy._replace(any_waiting=len(lanes) > 0)


def packed_entries(lengths: npt.NDArray[Any], references: npt.NDArray[Any]) -> Indices:
    """Lengths and references as the second number of index entries."""
    return lengths.astype(np.int64) | references.astype(np.int64) << LENGTH_BITS
