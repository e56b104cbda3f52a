"""The index: which frames make up the observation in slot ``t`` of environment ``e``, and which frame store has them.

Usually there is one frame store. When ``auto`` changes to another codec, a new store is added, and the stores of
earlier codecs stay until their last observation has been overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.anonymous_memory import zeros
from sb3_extra_buffers.codecs.base import Codec, Indices
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.storage.arena import Arena
from sb3_extra_buffers.storage.base_store import BaseStore
from sb3_extra_buffers.storage.config import CodecRecipe
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.gathering import gather_observations
from sb3_extra_buffers.storage.stacking import StackLayout

_WORTH_COMPACTING = 1 << 20
"""Smaller arenas, in bytes, are not compacted."""
_PIECE = 4096
"""The slots in one piece of the index. Only pieces that have changed are searched for the oldest frames."""
_SAMPLES, _SAMPLED_SLOTS = 4, 256
"""How many runs of slots in how many lanes show whether compacting may be worth it, and the slots of a run."""


class EarlierCodec(NamedTuple):
    """A codec that was replaced, with the observations that it still holds."""

    recipe: CodecRecipe
    frames: FrameStore


class ObservationIndex(BaseStore):
    """``n_slots`` × ``n_envs`` observations in one or more *columns*, and the frame stores that hold their frames.

    Every method that changes several attributes ends with one assignment to all of them, so that Ctrl-C leaves either
    the old state or the new one.
    """

    layout: StackLayout
    recipe: CodecRecipe
    frames: FrameStore
    """The store of the codec in use."""

    def __init__(
        self, n_slots: int, n_envs: int, *args: Any, make_arena: Callable[[], Arena] = Arena, **kwargs: Any
    ) -> None:
        super().__init__(n_slots, n_envs, *args, **kwargs)
        self._make_arena = make_arena
        self.ends = [self._make_zeros((n_slots, n_envs), np.dtype(np.uint32)) for _ in range(self.n_columns)]
        """The number of the frame after an observation's last frame; 0 where there is no observation."""
        self._piece = _PIECE
        self._lowest_ends = np.zeros((0, n_envs), dtype=np.uint32)
        """For each piece of the slots, the lowest end of each lane, minus one."""
        self._is_current = np.zeros(-(-n_slots // self._piece), dtype=np.bool_)
        """For each piece of the slots, whether its lowest ends are up to date."""
        self._ends_searched: list[npt.NDArray[np.uint32]] | None = None
        """The ``ends`` in which these were found. After ``ends`` is replaced, all pieces are searched again."""
        self._earlier: list[EarlierCodec] = []
        """Replaced codecs that still hold observations, the newest first."""
        self._compact_at = _WORTH_COMPACTING
        """The size of the arena at which to check whether most of it is dead."""

    @property
    def codec(self) -> Codec:
        return self.frames.codec

    @property
    def frame_stores(self) -> list[FrameStore]:
        """All frame stores, the one in use first."""
        return [self.frames, *[earlier.frames for earlier in self._earlier]] if self._earlier else [self.frames]

    @property
    def payload_bytes(self) -> int:
        """The size of compressed observations."""
        return sum(frames.arena.live_bytes for frames in self.frame_stores)

    @property
    def reference_bytes(self) -> int:
        return sum(frames.reference_bytes for frames in self.frame_stores)

    def use(self, layout: StackLayout, recipe: CodecRecipe) -> None:
        """Start anew with an empty frame store."""
        self.frames, self.layout, self.recipe = self._make_frames(layout, recipe), layout, recipe

    def change_codec(self, recipe: CodecRecipe) -> None:
        """Store new observations with another codec. Stored observations keep theirs until they are overwritten."""
        frames = self._make_frames(self.layout, recipe, begin_after=self.frames.heads)
        replaced = EarlierCodec(self.recipe, self.frames)
        self._earlier, self.frames, self.recipe = [replaced, *self._earlier], frames, recipe
        replaced.frames.close()

    def release_earlier(self) -> None:
        """Release the records of earlier codecs that no observation needs any more."""
        if self._earlier:
            oldest = self._oldest()
            for _, frames in self._earlier:
                frames.release(oldest)
                frames.arena.discard_dead()
            self._earlier = [earlier for earlier in self._earlier if (oldest < earlier.frames.heads).any()]

    def renumber(self) -> None:
        """Lower all frame numbers, before they become too large for an entry of the index."""
        frames = self.frames
        group = frames.codec.frames_per_record
        # Lowering numbers by multiples of this leaves every frame at its place in the ring and in the index.
        period = math.lcm(frames.index.capacity * group, frames.ring.shape[1])
        shifts = frames.first_records * group // period * period
        if self._earlier or not shifts.all():
            self.rebuild(self.layout, self.recipe)
            return
        lower = [self._make_zeros(ends.shape, ends.dtype) for ends in self.ends]
        for ends, column in zip(self.ends, lower, strict=True):
            np.subtract(ends, shifts.astype(np.uint32), out=column, where=ends > 0)
        self.ends, frames.base, frames.heads, frames.encoded, frames.first_records = (
            lower,
            np.zeros_like(frames.base),
            frames.heads - shifts,
            frames.encoded - shifts,
            frames.first_records - shifts // group,
        )

    def rebuild(self, layout: StackLayout, recipe: CodecRecipe) -> None:
        """Store all observations again, in the order in which they came."""
        before = self.layout, self.recipe, self.frames, self.ends, self._earlier
        old_layout, old_ends = self.layout, self.ends
        stores, slots = self.frame_stores, self.slots_by_age()
        try:
            self.use(layout, recipe)
            # Not zeros_like(), which would write to all pages, and so make them resident.
            self.ends = [self._make_zeros(ends.shape, ends.dtype) for ends in old_ends]
            self._earlier = []
            for slot in slots.tolist():
                for column, ends in enumerate(old_ends):
                    lanes = np.flatnonzero(ends[slot])
                    if len(lanes):
                        found = np.empty((len(lanes), *self.shape), dtype=self.stored_dtype)
                        firsts = ends[slot, lanes].astype(np.int64) - old_layout.stack
                        gather_observations(stores, old_layout, lanes, firsts[None], [found])
                        numbers = self.frames.append(lanes, found, self._oldest)
                        self._is_current[slot // self._piece] = False
                        self.ends[column][slot, lanes] = numbers
        except BaseException:
            self.layout, self.recipe, self.frames, self.ends, self._earlier = before
            raise

    def compact(self) -> None:
        """Store all observations again if most bytes of the arena are dead.

        That only happens when slots are overwritten in random order. Buffers overwrite them in turn, which always frees
        the oldest bytes of the arena.
        """
        # Counting all frames takes 100 ms for a million transitions, so first a sample shows whether that is worth it.
        if self._looks_mostly_dead():
            in_use = float(self._frames_in_use() @ mean_frame_bytes(self.frames))
            if 2 * in_use < self.frames.arena.live_bytes:
                self.rebuild(self.layout, self.recipe)
        self._compact_at = max(_WORTH_COMPACTING, self.frames.arena.nbytes * 5 // 4)

    def _looks_mostly_dead(self) -> bool:
        """Estimate from some slots of some lanes whether observations use less than half of the stored frames."""
        frames, n_slots = self.frames, min(self.slots_used, _SAMPLED_SLOTS)
        first_slots = np.linspace(0, self.slots_used - n_slots, _SAMPLES, dtype=np.int64).tolist()
        lanes = np.linspace(0, self.n_envs - 1, min(self.n_envs, _SAMPLES), dtype=np.int64)
        n_used = 0
        for lane in lanes.tolist():
            for first in first_slots:
                ends = np.sort(np.concatenate([column[first : first + n_slots, lane] for column in self.ends]))
                n_used += int(np.minimum(np.diff(ends, prepend=np.uint32(0)), self.layout.stack).sum())
        n_stored = (frames.heads - frames.first_records * frames.codec.frames_per_record)[lanes].sum()
        return bool(2 * n_used * self.slots_used < n_stored * n_slots * _SAMPLES)

    def _frames_in_use(self) -> Indices:
        """How many frames of each lane belong to observations."""
        columns, stack = [ends[: self.slots_used] for ends in self.ends], np.uint32(self.layout.stack)
        counts = np.zeros(self.n_envs, dtype=np.int64)
        ends, gaps = zeros((2, len(columns) * self.slots_used), np.dtype(np.uint32))
        for lane in range(self.n_envs):
            np.concatenate([column[:, lane] for column in columns], out=ends)
            ends.sort()
            # In the order of ends, an observation only shares frames with the one before it.
            gaps[0] = ends[0]
            np.subtract(ends[1:], ends[:-1], out=gaps[1:])
            counts[lane] = np.minimum(gaps, stack, out=gaps).sum(dtype=np.int64)
        return counts

    def check_index(self) -> None:
        """Raise :class:`~sb3_extra_buffers.errors.CorruptDataError` unless every observation has frames that exist.

        A large buffer is checked in seconds, because only the newest observations are decoded.
        """
        for frames in self.frame_stores:
            frames.check()
        for number in np.flatnonzero(self._is_current & (self._ends_searched is self.ends)).tolist():
            if (self._lowest_ends[number] != self._lowest_ends_of(number)).any():
                raise CorruptDataError(f"Piece {number} of the index has changed since its oldest frames were found.")
        for newer, older in pairwise(self.frame_stores):
            if (older.heads > newer.base).any():
                raise CorruptDataError("Two codecs have frames of the same number.")
        bounds = [
            (frames.first_records * frames.codec.frames_per_record + self.layout.stack, frames.heads)
            for frames in self.frame_stores
        ]
        for column, ends in enumerate(self.ends):
            for i in range(0, self.slots_used, _PIECE):
                piece = ends[i : min(i + _PIECE, self.slots_used)]
                exists = piece == 0
                for lowest, highest in bounds:
                    exists |= (piece >= lowest) & (piece <= highest)
                if not exists.all():
                    slot, env = np.argwhere(~exists)[0].tolist()
                    raise CorruptDataError(
                        f"The observation in column {column}, slot {i + slot}, environment {env} needs frames before "
                        f"number {piece[slot, env]} that do not exist."
                    )

    def _firsts(self, wanted: list[tuple[int, Indices]], envs: Indices) -> Indices:
        """The first frame of each observation, ``(columns, n)``; negative where there is no observation."""
        firsts = np.empty((len(wanted), len(envs)), dtype=np.int64)
        before = None
        for row, (column, slots) in zip(firsts, wanted, strict=True):
            if slots is not before:
                places, before = slots * self.n_envs + envs, slots
            row[:] = self.ends[column].reshape(-1).take(places)  # faster than [slots, envs]
        firsts -= self.layout.stack
        return firsts

    def _read_with_gaps(self, lanes: Indices, firsts: Indices, outs: list[npt.NDArray[Any]]) -> None:
        """Fill ``outs``, with zeros where there is no observation."""
        for first, out in zip(firsts, outs, strict=True):
            written = first >= 0
            out[~written] = 0
            if written.any():
                found = np.empty((int(written.sum()), *self.shape), dtype=self.stored_dtype)
                gather_observations(self.frame_stores, self.layout, lanes[written], first[written][None], [found])
                out[written] = found

    def _steps_at(self, slots: Indices) -> npt.NDArray[Any]:
        """The observations of all environments in ``slots`` of column 0."""
        where, envs = np.repeat(slots, self.n_envs), np.tile(np.arange(self.n_envs), len(slots))
        out = np.empty((len(where), *self.shape), dtype=self.stored_dtype)
        self._read_with_gaps(envs, self._firsts([(0, where)], envs), [out])
        return out.reshape(len(slots), self.n_envs, *self.shape)

    def _oldest(self) -> Indices:
        """The oldest frame of each lane that an observation still needs."""
        n_pieces = -(-max(self.slots_used, 1) // self._piece)
        if self._ends_searched is not self.ends:
            self._ends_searched, self._is_current[:] = self.ends, False
        if n_pieces > len(self._lowest_ends):
            larger = np.zeros((min(2 * n_pieces, len(self._is_current)), self.n_envs), dtype=np.uint32)
            larger[: len(self._lowest_ends)] = self._lowest_ends
            self._lowest_ends = larger
        for piece in np.flatnonzero(~self._is_current[:n_pieces]).tolist():
            self._lowest_ends[piece] = self._lowest_ends_of(piece)
            self._is_current[piece] = True
        oldest: Indices = self._lowest_ends[:n_pieces].min(axis=0).astype(np.int64) + 1 - self.layout.stack
        return oldest

    def _lowest_ends_of(self, piece: int) -> npt.NDArray[np.uint32]:
        part = slice(piece * self._piece, min((piece + 1) * self._piece, max(self.slots_used, 1)))
        # Minus one: then 0, which means "never written", wraps around and becomes the largest number.
        lowest = [(ends[part] - np.uint32(1)).min(axis=0) for ends in self.ends]
        found: npt.NDArray[np.uint32] = np.min(lowest, axis=0)
        return found

    def slots_by_age(self, *columns: npt.NDArray[np.uint32]) -> Indices:
        """Slots that hold an observation in one of these columns (by default, in any), oldest first."""
        columns = columns or tuple(self.ends)
        newest = np.max([ends[: self.slots_used].max(axis=1) for ends in columns], axis=0)
        slots = np.flatnonzero(newest)
        return slots[np.argsort(newest[slots], kind="stable")]

    def _make_frames(self, layout: StackLayout, recipe: CodecRecipe, begin_after: Indices | None = None) -> FrameStore:
        return FrameStore(
            recipe.build(layout.frame),
            self.n_envs,
            layout,
            self._make_arena(),
            observations_at_once=2,  # of a step of a replay buffer
            begin_after=begin_after,
            expected_frames=self.n_slots,
        )


def mean_frame_bytes(frames: FrameStore) -> npt.NDArray[np.float64]:
    """The mean size of each lane's frames in the arena."""
    group = frames.codec.frames_per_record
    lanes, numbers = frames.live_records()
    totals = np.bincount(lanes, frames.index.lengths.take(frames.index.places(lanes, numbers)), frames.n_lanes)
    means: npt.NDArray[np.float64] = totals / (group * np.maximum(np.bincount(lanes, minlength=frames.n_lanes), 1))
    return means
