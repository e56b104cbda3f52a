"""Frames of several lanes, most of them compressed.

A lane is one environment's frames in the order of arrival, numbered from zero. The newest frames of a lane wait in a
small ring of raw frames; as soon as ``frames_per_record`` of them are complete, the codec turns them into a record in
the arena. Record ``r`` of a lane holds the frames ``r * frames_per_record`` and following, so a frame is found by
division, and per record only its place, length and reference are kept.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sb3_extra_buffers.codecs.base import Bytes, Codec, Indices
from sb3_extra_buffers.storage.arena import Arena
from sb3_extra_buffers.storage.matching import append_unless_known


class FrameStore:
    """Appends observations of ``stack`` frames to ``n_lanes`` lanes, sharing frames with the observation before."""

    def __init__(self, codec: Codec, n_lanes: int, stack: int) -> None:
        self.codec = codec
        self.stack = stack
        self.n_lanes = n_lanes
        self.arena = Arena()
        group = codec.frames_per_record
        # Room for an unfinished record and a whole observation; a multiple of the record, so that each is contiguous.
        ring_size = -(-(group - 1 + 2 * stack) // group) * group
        self.ring = np.zeros((n_lanes, ring_size, codec.frame.nbytes), dtype=np.uint8)
        self.heads = np.zeros(n_lanes, dtype=np.int64)
        """Frames that ever arrived in a lane, and so the number of the next one."""
        self.floors = np.zeros(n_lanes, dtype=np.int64)
        """The oldest frame of a lane that a new observation may be compared with."""
        self.encoded = np.zeros(n_lanes, dtype=np.int64)
        """Frames before this one are in records, the others in the ring."""
        self.first_records = np.zeros(n_lanes, dtype=np.int64)
        self.starts = np.zeros((n_lanes, 8), dtype=np.int64)
        self.lengths = np.zeros((n_lanes, 8), dtype=np.uint32)
        self.references = np.zeros((n_lanes, 8), dtype=np.uint32)

    def append(self, lanes: Indices, observations: Bytes, oldest: Callable[[], Indices]) -> Indices:
        """Store one observation per lane, and return for each the number of the frame after its last one.

        ``observations`` is ``(n, stack, frame_bytes)``. ``oldest`` tells, when room is needed, the oldest frame of each
        lane that is still wanted.
        """
        ends, waiting = append_unless_known(lanes, observations, self.ring, self.heads, self.floors, self.encoded)
        if waiting >= self.codec.frames_per_record:
            self._encode_waiting(oldest)
        return ends

    def gather(self, lanes: Indices, firsts: list[Indices], outs: list[Bytes]) -> None:
        """Fill each of ``outs`` with the ``stack`` frames from ``firsts`` on. See :meth:`Codec.gather`."""
        self.codec.gather(self, lanes, firsts, outs)

    def gather_records(self, lanes: Indices, firsts: list[Indices], outs: list[Bytes]) -> None:
        """The way of codecs that decode whole records: every record needed is decoded once, then frames are copied."""
        group = self.codec.frames_per_record
        wanted = np.concatenate([first[:, None] + np.arange(out.shape[1]) for first, out in zip(firsts, outs)], axis=1)
        lanes = np.broadcast_to(lanes[:, None], wanted.shape)
        waiting = wanted >= self.encoded[lanes]

        slots = lanes * self.starts.shape[1] + wanted // group % self.starts.shape[1]
        records, rows = np.unique(slots[~waiting], return_inverse=True)
        decoded = np.empty((len(records), self.codec.record_bytes), dtype=np.uint8)
        self.codec.decode(
            self.arena.data,
            self.starts.ravel()[records],
            self.lengths.ravel()[records].astype(np.int64),
            self.references.ravel()[records].astype(np.int64),
            decoded,
        )
        frames = decoded.reshape(-1, self.codec.frame.nbytes)
        if waiting.any():
            frames = np.concatenate([frames, self.ring[lanes[waiting], wanted[waiting] % self.ring.shape[1]]])

        sources = np.empty(wanted.shape, dtype=np.int64)
        sources[~waiting] = rows * group + wanted[~waiting] % group
        sources[waiting] = np.arange(len(records) * group, len(frames))
        column = 0
        for out in outs:
            n, stack, nbytes = out.shape
            chosen = sources[:, column : column + stack].reshape(-1)
            np.take(frames, chosen, axis=0, out=out.reshape(n * stack, nbytes), mode="clip")
            column += stack

    def release(self, oldest: Indices) -> None:
        """Forget the records whose frames are all older than ``oldest`` and than what the next observation may share."""
        group = self.codec.frames_per_record
        self.floors = np.maximum(self.floors, np.minimum(oldest, self.heads - self.stack))
        keep_from = np.minimum(self.floors, self.encoded) // group
        capacity = self.starts.shape[1]
        for lane in np.flatnonzero(keep_from > self.first_records).tolist():
            gone = np.arange(self.first_records[lane], keep_from[lane]) % capacity
            self.codec.release(self.references[lane, gone].astype(np.int64))
        self.first_records = np.maximum(self.first_records, keep_from)
        alive = np.flatnonzero(self.first_records < self.encoded // group)
        if len(alive) == 0:
            self.arena.clear()
            return
        oldest_starts = self.starts[alive, self.first_records[alive] % capacity]
        self.arena.free_until(int(oldest_starts[self.arena.distance(oldest_starts).argmin()]))

    def clear(self) -> None:
        """Forget all frames, but not what the codec has learnt from them."""
        group = self.codec.frames_per_record
        # Numbering goes on at the next whole record, as if the unfinished one had been completed.
        self.heads = -(-self.heads // group) * group
        self.floors = self.heads.copy()
        self.encoded = self.heads.copy()
        self.release(self.heads)

    @property
    def index_bytes(self) -> int:
        return self.starts.nbytes + self.lengths.nbytes + self.references.nbytes

    def _encode_waiting(self, oldest: Callable[[], Indices]) -> None:
        group = self.codec.frames_per_record
        while True:
            lanes = np.flatnonzero(self.heads - self.encoded >= group)
            if len(lanes) == 0:
                return
            positions = self.encoded[lanes] % self.ring.shape[1]
            frames = self.ring[lanes[:, None], positions[:, None] + np.arange(group)]
            data, lengths, references = self.codec.encode(frames.reshape(len(lanes), -1), lanes)
            start = self._allocate(len(data), oldest)
            self.arena.data[start : start + len(data)] = data
            records = self.encoded[lanes] // group % self.starts.shape[1]
            self.starts[lanes, records] = start + np.cumsum(lengths) - lengths
            self.lengths[lanes, records] = lengths
            self.references[lanes, records] = references
            self.encoded[lanes] += group

    def _allocate(self, size: int, oldest: Callable[[], Indices]) -> int:
        if self._index_is_full():
            self.release(oldest())
            if self._index_is_full(spare=self.starts.shape[1] // 16):
                self._grow_index()
        start = self.arena.allocate(size)
        if start is None:
            before = self.arena.live_bytes
            self.release(oldest())
            # Looking for the oldest frame costs time, so it must be worth it: with too little gained, grow as well.
            if before - self.arena.live_bytes >= max(size, self.arena.limit // 64):
                start = self.arena.allocate(size)
        while start is None:
            boundary, shift = self.arena.grow(size)
            if shift:
                self.starts[self.starts >= boundary] += shift
            start = self.arena.allocate(size)
        return start

    def _index_is_full(self, spare: int = 0) -> bool:
        records = self.encoded // self.codec.frames_per_record - self.first_records
        return bool(records.max() + spare >= self.starts.shape[1])

    def _grow_index(self) -> None:
        capacity = self.starts.shape[1]
        larger = capacity + max(capacity // 8, 8)
        numbers = self.first_records[:, None] + np.arange(capacity)
        lanes = np.arange(self.n_lanes)[:, None]
        for name in ("starts", "lengths", "references"):
            old = getattr(self, name)
            new = np.zeros((self.n_lanes, larger), dtype=old.dtype)
            new[lanes, numbers % larger] = old[lanes, numbers % capacity]
            setattr(self, name, new)
