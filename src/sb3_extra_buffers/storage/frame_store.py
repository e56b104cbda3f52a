"""Frames of several lanes, most of them compressed.

A lane is one environment's frames in the order of arrival, numbered from zero. The newest frames of a lane wait in a
small ring of raw frames. The codec encodes ``frames_per_record`` of them as one record, which goes to the arena. Record
``r`` of a lane holds the frames from ``r * frames_per_record`` on, so a division finds the record of a frame. An index
stores where each record is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.anonymous_memory import zeros
from sb3_extra_buffers.codecs.base import Bytes, Codec, Encoded, Indices
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.arena import Arena
from sb3_extra_buffers.storage.extent_arena import ExtentArena, ready_to_grow
from sb3_extra_buffers.storage.gathering import gather_frames
from sb3_extra_buffers.storage.matching import NewestObservations
from sb3_extra_buffers.storage.record_index import RecordIndex
from sb3_extra_buffers.storage.stacking import MemoryForm, StackLayout, numbers_from

_FEW_LANES = 16
"""Up to this many lanes, the rings have room for another record."""
_BYTE = np.dtype(np.uint8)
_LARGE_INDEX = 1 << 12
"""An index of at least this many records per lane has its full size from the start."""
_MOST_WAITING = 1 << 16  # no version has had a ring with more frames


class FrameStore:
    """The frames of ``n_lanes`` lanes. An observation that is appended shares frames with the one before."""

    def __init__(
        self,
        codec: Codec,
        n_lanes: int,
        layout: StackLayout,
        arena: Arena | None = None,
        observations_at_once: int = 1,
        begin_after: Indices | None = None,
        expected_frames: int = 0,
    ) -> None:
        """
        :param observations_at_once: The most observations per lane for which :meth:`make_room` is called.
        :param begin_after: For each lane, the lowest frame number that this store may use.
        :param expected_frames: How many frames each lane is going to have, if that is known. A large index has room for
            them from the start, because copying it would take long. Until it is written, it takes no memory.
        """
        self.codec = codec
        self.layout = layout
        self.n_lanes = n_lanes
        self.arena = arena or Arena()
        self._observations_at_once = observations_at_once
        group = codec.frames_per_record
        self.ring = zeros((n_lanes, self._ring_size(), codec.frame.nbytes), _BYTE)
        self.first_records = -(-(np.zeros(n_lanes, dtype=np.int64) if begin_after is None else begin_after) // group)
        self.base = self.first_records * group
        """The lowest frame number of each lane in this store."""
        self.heads = self.base.copy()
        """The number of the next frame of each lane."""
        self.newest = NewestObservations(n_lanes, layout.stack)
        self.encoded = self.base.copy()
        """For each lane: frames before this number are in records, the others are in the ring."""
        self._most_waiting = 0
        """An upper bound of the frames that any lane has in the ring."""
        self._bytes_encoded = 0
        self._frames_encoded = 0
        capacity = expected_frames // group * 9 // 8
        self.index = RecordIndex(n_lanes, capacity if capacity >= _LARGE_INDEX else 8)
        self.held: dict[str, int] = {}
        """The numbers of references that came with segments, by checksum. The next segment may need them again."""

    def append(self, lanes: Indices, observations: npt.NDArray[Any], oldest: Callable[[], Indices]) -> Indices:
        """Store one observation per lane, and return for each the number of the frame after its last one.

        :param oldest: Called when there is no room. Returns the oldest frame of each lane that is still needed.
        """
        self.make_room(1, oldest)
        memory, form = self.layout.in_memory(observations)
        (ends,) = self._append(lanes, (memory,), form)
        return ends

    def append_pairs(
        self, lanes: Indices, pair: Sequence[npt.NDArray[Any]], oldest: Callable[[], Indices]
    ) -> Sequence[Indices]:
        """Store an observation and its successor per lane, after a call of :meth:`make_room` for both.

        Returns what :meth:`append` returns, for each of the two.
        """
        memory, form = self.layout.in_memory(pair[0])
        following, other_form = self.layout.in_memory(pair[1])
        if form != other_form:
            return [self.append(lanes, observations, oldest) for observations in pair]
        return self._append(lanes, (memory, following), form)

    def _append(self, lanes: Indices, memories: tuple[Bytes, ...], form: MemoryForm) -> Sequence[Indices]:
        most_waiting = self._most_waiting
        # Until it is known how many frames are new, all count as new: then Ctrl-C cannot let the ring overflow.
        self._most_waiting = most_waiting + len(memories) * self.layout.stack
        ends, waiting = self.newest.append(lanes, memories, form, self.ring, self.heads, self.encoded)
        self._most_waiting = max(most_waiting, waiting)
        return ends  # type: ignore[return-value]  # a row for each observation

    def make_room(self, n_observations: int, oldest: Callable[[], Indices]) -> None:
        """Make room for ``n_observations`` per lane. All that can fail happens here, before anything is stored."""
        # Encode as late as possible: then most lanes have a complete record, and one call encodes all of them.
        while self._most_waiting + n_observations * self.layout.stack > self.ring.shape[1]:
            self._encode_waiting(oldest)
            self._most_waiting = int((self.heads - self.encoded).max())

    gather = gather_frames
    """Fill batches with runs of consecutive frames."""

    def release(self, oldest: Indices) -> None:
        """Free records whose frames are all older than ``oldest`` and than the newest observation."""
        group = self.codec.frames_per_record
        newest = np.where(self.newest.known, self.heads - self.layout.stack, self.heads)
        keep_from = np.minimum(np.minimum(oldest, newest), self.encoded) // group
        keep_from = np.maximum(keep_from, self.first_records)
        gone = self.index.references_of(self.first_records, keep_from)
        # Drop the records first, then release their references. In the other order, Ctrl-C in between would leave
        # records whose references are released a second time.
        try:
            self.first_records = keep_from
            self.codec.release(gone)
        except BaseException:
            self._recount_uses()
            raise
        alive = np.flatnonzero(self.first_records < self.encoded // group)
        if len(alive) == 0:
            self.arena.clear()
            return
        oldest_starts = self.index.starts.take(self.index.places(alive, self.first_records[alive]))
        self.arena.free_until(int(oldest_starts[self.arena.distance(oldest_starts).argmin()]))

    def clear(self) -> None:
        """Remove all frames. The codec keeps what it has learnt from them."""
        self.newest.forget()
        self.release(self.encoded)
        # Numbering continues at the next whole record, but only after release(): the unfinished record was never
        # written, so it has no reference to release.
        group = self.codec.frames_per_record
        first_records = -(-self.heads // group)
        heads, encoded = first_records * group, first_records * group
        self.heads, self.encoded, self.first_records, self._most_waiting = heads, encoded, first_records, 0

    def close(self) -> None:
        """Shrink the ring to the frames that it holds: nothing will be appended any more."""
        n_frames = max(int((self.heads - self.encoded).max()), 1)
        ring = zeros((self.n_lanes, n_frames, self.codec.frame.nbytes), _BYTE)
        ring[self._waiting_places(n_frames)] = self.ring[self._waiting_places()]
        self.ring, self.newest = ring, NewestObservations(self.n_lanes, self.layout.stack)
        self.codec.free_encoder()

    def check(self) -> None:
        """Raise :class:`~sb3_extra_buffers.errors.CorruptDataError` unless all invariants of the store hold.

        They hold between any two operations, also if one of them was interrupted.
        """
        self._check_numbers()
        lanes, numbers = self.live_records()
        starts, lengths, _ = self.index.entries(self.index.places(lanes, numbers))
        wrong = (lengths < self.codec.min_encoded_size) | (lengths > self.codec.max_encoded_size)
        if wrong.any():
            at = int(wrong.argmax())
            raise CorruptDataError(
                f"Record {numbers[at]} of lane {lanes[at]} has {lengths[at]} bytes, which no record of the method "
                f"{self.codec.label!r} has."
            )
        self.arena.check(starts, lengths)
        backwards = (np.diff(self.arena.distance(starts)) <= 0) & (np.diff(lanes) == 0)
        if backwards.any():
            at = int(backwards.argmax())
            raise CorruptDataError(f"Record {numbers[at + 1]} of lane {lanes[at]} lies before its predecessor.")
        self.codec.check(self._all_references())
        self._check_newest()

    def _check_numbers(self) -> None:
        """Check the numbers that compiled code trusts as array indices."""
        group, capacity, waiting = self.codec.frames_per_record, self.index.capacity, self.heads - self.encoded
        stops = self.encoded // group
        right = (
            (self.first_records >= 0)
            & (self.first_records <= stops)
            & (stops - self.first_records <= capacity)
            & (self.encoded % group == 0)
            & (waiting >= 0)
            & (waiting <= self.ring.shape[1])
            & (self.heads <= np.iinfo(np.uint32).max)
            & (self.base <= self.first_records * group)
        )
        if capacity == 0 or not right.all():
            lane = int(right.argmin())
            raise CorruptDataError(
                f"The numbers of lane {lane} contradict each other: {self.heads[lane]} frames, {self.encoded[lane]} of "
                f"them in records of {group}, from record {self.first_records[lane]} on, in an index of {capacity}."
            )

    def _check_newest(self) -> None:
        """Check that the newest observation, which the next one is compared with, is the stored one."""
        lanes = np.flatnonzero(self.newest.known)
        firsts = self.heads[lanes] - self.layout.stack
        if (firsts < self.first_records[lanes] * self.codec.frames_per_record).any():
            raise CorruptDataError("Frames of the newest observation, which the next one may share, are gone.")
        if len(lanes) == 0:
            return
        stored = np.empty((len(lanes), self.layout.stack, self.codec.frame.nbytes), dtype=np.uint8)
        self.gather(lanes, firsts[None], [stored])
        differs = (stored != self.newest.frames(lanes)).any(axis=(1, 2))
        if differs.any():
            raise CorruptDataError(f"The newest observation of lane {lanes[differs.argmax()]} is not the stored one.")

    def live_records(self) -> tuple[Indices, Indices]:
        """The lane and the number of each record, lane by lane."""
        stops = self.encoded // self.codec.frames_per_record
        return numbers_from(self.first_records, stops - self.first_records)

    @property
    def reference_bytes(self) -> int:
        """The bytes of references, and of the newest frames, which are raw."""
        return self.codec.reference_bytes + self.ring.nbytes + self.newest.nbytes

    @property
    def index_bytes(self) -> int:
        """The bytes of the part of the index that was written."""
        n_records = int((self.encoded - self.base).max()) // self.codec.frames_per_record
        return self.index.nbytes * min(n_records, self.index.capacity) // self.index.capacity

    def mean_frame_bytes(self, at_least: int = 1) -> float | None:
        """The mean size of the frames that were encoded since :meth:`restart_mean`; ``None`` if they are too few."""
        return None if self._frames_encoded < at_least else self._bytes_encoded / self._frames_encoded

    def restart_mean(self) -> None:
        self._bytes_encoded = self._frames_encoded = 0

    def state(self) -> State:
        return {
            "waiting": self.ring[self._waiting_places()],
            "base": self.base,
            "heads": self.heads,
            "encoded": self.encoded,
            "bytes_encoded": self._bytes_encoded,
            "frames_encoded": self._frames_encoded,
            "first_records": self.first_records,
            **self.index.state(),
            "newest": self.newest.state(),
            "arena": self.arena.state(),
            "codec": self.codec.state(),
        }

    def restore(self, state: SavedState) -> None:
        """Read what :meth:`state` returned, in a store that was made with the same arguments."""
        n_lanes = self.n_lanes
        self.base = state.array("base", np.int64, (n_lanes,)) if state.has("base") else np.zeros_like(self.base)
        self.heads = state.array("heads", np.int64, (n_lanes,))
        self.encoded = state.array("encoded", np.int64, (n_lanes,))
        self._bytes_encoded = state.integer("bytes_encoded")
        self._frames_encoded = state.integer("frames_encoded")
        self.first_records = state.array("first_records", np.int64, (n_lanes,))
        self.index = RecordIndex.restored(state, n_lanes)
        self.newest.restore(state.part("newest"), self.codec.frame.nbytes)
        arena = state.part("arena")
        # An Arena moves bytes when it grows, which would load a mapped file into memory. An ExtentArena never does.
        if arena.has("extents") or (arena.is_mapped and type(self.arena) is Arena):
            self.arena = self.arena if isinstance(self.arena, ExtentArena) else ExtentArena()
        self.arena.restore(arena)
        self.codec = self.codec.restored(state.part("codec"))
        group, waiting = self.codec.frames_per_record, self.heads - self.encoded
        if (waiting < 0).any() or (waiting > _MOST_WAITING).any():
            raise state.error("encoded", "does not agree with the other numbers of frames")
        frames = state.array("waiting", np.uint8, (int(waiting.sum()), self.codec.frame.nbytes))
        n_frames = max(self._ring_size(), -(-int(waiting.max()) // group) * group)
        self.ring = zeros((n_lanes, n_frames, self.codec.frame.nbytes), _BYTE)
        self._most_waiting = int(waiting.max())
        self.ring[self._waiting_places()] = frames
        try:
            self._check_numbers()
        except CorruptDataError as error:
            raise state.error("encoded", f"contradicts other numbers: {error}") from error
        if not self._recount_uses():
            raise state.error("references", "name reference frames or dictionaries that do not exist")

    def _ring_size(self) -> int:
        """The frames of the ring: an unfinished record, and the observations of one call.

        With a few lanes, there is room for one more record, so that all lanes complete one and are encoded in one call.
        """
        group, stack = self.codec.frames_per_record, self.layout.stack
        more = group if self.n_lanes <= _FEW_LANES and self.codec.encodes_together else 0
        return max(group - 1 + self._observations_at_once * stack + more, -(-(group - 1 + stack) // group) * group)

    def _waiting_places(self, ring_size: int = 0) -> tuple[Indices, Indices]:
        """The lane of each frame in the rings, and its place there or in a ring of another size."""
        lanes, numbers = numbers_from(self.encoded, self.heads - self.encoded)
        return lanes, numbers % (ring_size or self.ring.shape[1])

    def _encode_waiting(self, oldest: Callable[[], Indices]) -> bool:
        """Encode one record of each lane that has a complete one. Returns false if there is none."""
        group = self.codec.frames_per_record
        lanes = np.flatnonzero(self.heads - self.encoded >= group)
        if len(lanes) == 0:
            return False
        positions = (self.encoded[lanes, None] + np.arange(group)) % self.ring.shape[1]
        frames = self.ring[lanes[:, None], positions]
        try:
            records = self.codec.encode(frames.reshape(len(lanes), -1), lanes)
            self.write_records(lanes, self.encoded[lanes] // group, records, oldest)
            self.encoded[lanes] += group  # from now on, the records are read instead of the ring
        except BaseException:
            # The codec may have counted references of records that were not stored.
            self._recount_uses()
            raise
        return True

    def write_records(self, lanes: Indices, numbers: Indices, records: Encoded, oldest: Callable[[], Indices]) -> None:
        """Write records to the arena and the index. Nothing reads them until ``encoded`` counts their frames.

        :param numbers: The number of each record in its lane.
        """
        data, lengths, references = records
        start = self.allocate(len(data), oldest)
        self.arena.write(start, data)
        self.index.write(lanes, numbers, start + lengths.cumsum() - lengths, lengths, references)
        self._bytes_encoded += len(data)
        self._frames_encoded += self.codec.frames_per_record * len(lanes)

    def _recount_uses(self) -> bool:
        """Let the codec recount its references. Returns false if one of them does not exist."""
        return self.codec.count_uses(self._all_references())

    def _all_references(self) -> Indices:
        stops = self.encoded // self.codec.frames_per_record
        held = np.array([*self.held.values()], dtype=np.int64)
        return np.append(self.index.references_of(self.first_records, stops), held)

    def allocate(self, size: int, oldest: Callable[[], Indices]) -> int:
        """Make room in the index, reserve ``size`` bytes in the arena, and return where these start."""
        self._make_index_room(self.encoded // self.codec.frames_per_record, oldest)
        start = self.arena.allocate(size)
        if start is None:
            before = self.arena.live_bytes
            self.release(oldest())
            # Searching for the oldest frame takes time. If that frees little, grow as well, to put off the next search.
            if before - self.arena.live_bytes >= max(size, self.arena.limit // 64):
                start = self.arena.allocate(size)
        while start is None:
            self.arena = ready_to_grow(self.arena)
            boundary, shift = self.arena.grow(size)
            if shift:
                # Not in a method of the index: Python may handle Ctrl-C when it is called. Then the bytes would have
                # moved, but the index would still have their old places.
                starts = self.index.starts
                np.add(starts, shift, out=starts, where=starts >= boundary)
            start = self.arena.allocate(size)
        return start

    def _make_index_room(self, stops: Indices, oldest: Callable[[], Indices]) -> None:
        """Make room in the index for one record more than those before ``stops`` of each lane."""
        if self.index.is_full(self.first_records, stops):
            self.release(oldest())
            while self.index.is_full(self.first_records, stops + self.index.capacity // 16):
                self._grow_index()

    def _grow_index(self) -> None:
        self.index = self.index.grown(self.first_records, self.encoded // self.codec.frames_per_record)
