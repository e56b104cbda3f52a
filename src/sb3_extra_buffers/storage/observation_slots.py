"""Observations by place: which frames of which lane make up the observation in slot ``t`` of environment ``e``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Codec, Indices
from sb3_extra_buffers.errors import CorruptDataError, ObservationError
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.arena import Arena
from sb3_extra_buffers.storage.checks import check_observations
from sb3_extra_buffers.storage.config import CodecRecipe, saturate
from sb3_extra_buffers.storage.digests import Digests, ObservationDigests, digests_of
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.gathering import gather_observations
from sb3_extra_buffers.storage.lanes import frames_in_use
from sb3_extra_buffers.storage.locking import BufferLock
from sb3_extra_buffers.storage.outputs import OutputPool
from sb3_extra_buffers.storage.stacking import MAX_STACK, StackLayout

_WORTH_COMPACTING = 1 << 20
_PIECE = 4096
CPU = th.device("cpu")


Appended = tuple[Sequence[Indices | int], Sequence[Digests] | None]
"""Observations whose frames are stored, but that are in no slot yet: for each of them, the numbers of the frames after
its last ones, and its digests."""


class EarlierCodec(NamedTuple):
    """What is left of the time when another codec was in use."""

    recipe: CodecRecipe
    frames: FrameStore


class ObservationSlots:
    """Observations of one space (of one key in a Dict space), ``n_slots`` × ``n_envs`` of them, in one or more
    *columns*, with the codec and layout that :meth:`use` sets.

    A replay buffer has two columns, observations and next observations, that share their frames. A slot that was never
    written reads as zeros, as in SB3.

    An observation is written in two parts: :meth:`append` stores its frames, and :meth:`place` puts it into a slot.
    Whatever happens in between, what was there before is still there.

    :param verify: Keep a checksum of every observation, and compare it when the observation is read.
    :param lock: What threads must hold to change or read the store; by default its own.
    """

    layout: StackLayout
    recipe: CodecRecipe
    frames: FrameStore

    def __init__(
        self,
        n_slots: int,
        n_envs: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        stored_dtype: np.dtype[Any],
        n_columns: int = 1,
        outputs: OutputPool | None = None,
        as_float: bool = False,
        divisor: float = 1.0,
        make_arena: Callable[[], Arena] = Arena,
        make_zeros: Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]] = np.zeros,
        verify: bool = False,
        lock: BufferLock | None = None,
    ) -> None:
        self.n_slots = n_slots
        self.n_envs = n_envs
        self.shape = shape
        self.dtype = dtype
        self.stored_dtype = stored_dtype
        self.outputs = outputs or OutputPool()
        self.output_dtype = np.dtype(np.float32) if as_float else dtype
        self.divisor = divisor
        self.lock = lock or BufferLock()
        self._make_arena = make_arena
        self._make_zeros = make_zeros
        self.ends = [make_zeros((n_slots, n_envs), np.dtype(np.uint32)) for _ in range(n_columns)]
        """The number of the frame after an observation's last one; 0 where there is none."""
        self.slots_used = 0
        """Slots from this one on have never been written to, so nobody has to look at them."""
        self.digests = ObservationDigests(n_columns, n_slots, n_envs, make_zeros) if verify else None
        self._earlier: list[EarlierCodec] = []
        """Codecs of which there are observations left, the newest first."""
        self._has_elements = math.prod(shape) > 0
        self._all_lanes = np.arange(n_envs)
        self._step_shape = (n_envs, *shape)
        self._compact_at = _WORTH_COMPACTING
        """The size of the arena at which to look whether most of it is dead."""

    @property
    def codec(self) -> Codec:
        return self.frames.codec

    @property
    def frame_stores(self) -> list[FrameStore]:
        """All frame stores, the one in use first."""
        return [self.frames, *[earlier.frames for earlier in self._earlier]] if self._earlier else [self.frames]

    @property
    def payload_bytes(self) -> int:
        """What compressed observations take."""
        return sum(frames.arena.live_bytes for frames in self.frame_stores)

    @property
    def reference_bytes(self) -> int:
        return sum(frames.reference_bytes for frames in self.frame_stores)

    def index_bytes(self, filled: float) -> int:
        """What it takes to find observations when this part of the slots is filled."""
        arrays = [*self.ends, *(self.digests.columns if self.digests else [])]
        entries = round(filled * sum(array.nbytes for array in arrays))
        return entries + sum(frames.index_bytes for frames in self.frame_stores)

    def checked(self, observations: npt.ArrayLike, n: int | None = None) -> npt.NDArray[Any]:
        """Observations for ``n`` (by default all) environments, ready to be written, or an error."""
        array = np.asarray(observations)
        if n is None and array.shape == self._step_shape:
            pass  # as it nearly always is
        elif array.shape != ((n := n or self.n_envs), *self.shape):
            # As in SB3, a single environment may leave out its axis, and numbers may have any.
            is_single = n == 1 and array.shape == self.shape
            if not is_single and (array.size != n or math.prod(self.shape) != 1):
                raise ObservationError(
                    f"Expected observations of shape {(n, *self.shape)}, one for each of {n} environments, "
                    f"but got {array.shape}. Is the buffer's observation space that of the environment?"
                )
            array = array.reshape(n, *self.shape)
        if array.dtype != self.dtype:
            array = self._cast(array)
        if not array.flags.writeable:  # for which compiled code would be compiled again
            array = array.copy(order="K")
        return array if array.dtype is self.stored_dtype else saturate(array, self.stored_dtype)

    def append(self, observations: Sequence[npt.NDArray[Any]], lanes: Indices | None = None) -> Appended:
        """Store the frames of one or two :meth:`checked` observations of all environments, for :meth:`place`."""
        digests = None if self.digests is None else [digests_of(part) for part in observations]
        if not self._has_elements:
            return [0] * len(observations), digests
        where = self._all_lanes if lanes is None else lanes
        if len(observations) == 2:
            return self.frames.append_pairs(where, observations, self._oldest), digests
        return [self.frames.append(where, observations[0], self._oldest)], digests

    def place(self, places: Sequence[tuple[int, int]], appended: Appended, lanes: Indices | None = None) -> None:
        """Put what was appended into columns and slots. Doing it twice does no harm."""
        ends, digests = appended
        for i, (column, slot) in enumerate(places):
            where = slot if lanes is None else (slot, lanes)
            if slot >= self.slots_used:  # first: frames of slots that are not in use are released
                self.slots_used = slot + 1
            self.ends[column][where] = ends[i]
            if self.digests is not None and digests is not None:
                self.digests.columns[column][where] = digests[i]

    def read(self, wanted: list[tuple[int, Indices]], envs: Indices, device: th.device = CPU) -> list[npt.NDArray[Any]]:
        """The observations at ``(slots[i], envs[i])``, for each column and its slots in ``wanted``, as fresh arrays."""
        if envs.dtype != np.int64:  # as NumPy 1 draws them on Windows
            envs = envs.astype(np.int64)
        with self.lock.held:
            outs = [self.outputs.take((len(envs), *self.shape), self.stored_dtype, device) for _ in wanted]
            firsts = self._firsts(wanted, envs)
            if firsts.min(initial=0) < 0:
                self._read_with_gaps(envs, firsts, outs)
            elif len(envs):
                gather_observations(self.frame_stores, self.layout, envs, firsts, outs)
            if self.digests is not None:
                for (column, slots), out in zip(wanted, outs, strict=True):
                    self.digests.compare(column, slots, envs, out)
        if self.stored_dtype != self.output_dtype:
            outs = [out.astype(self.dtype).astype(self.output_dtype) for out in outs]
        return outs if self.divisor == 1.0 else [out / np.float32(self.divisor) for out in outs]

    def clear(self) -> None:
        """Forget all observations; what was learnt about them stays."""
        with self.lock.held:
            for ends in self.ends:
                ends[: self.slots_used] = 0
            if self.digests is not None:
                self.digests.clear(self.slots_used)
            self._earlier = []
            self.frames.clear()

    def check(self) -> None:
        """Raise :class:`~sb3_extra_buffers.errors.CorruptDataError` if anything here contradicts something else."""
        with self.lock.held:
            check_observations(self)

    def use(self, layout: StackLayout, recipe: CodecRecipe) -> None:
        """Begin with an empty frame store."""
        self.frames, self.layout, self.recipe = self._make_frames(layout, recipe), layout, recipe

    def change_codec(self, recipe: CodecRecipe) -> None:
        """Store what comes from now on with another codec. What is stored already stays until it is overwritten."""
        frames = self._make_frames(self.layout, recipe, begin_after=self.frames.heads)
        replaced = EarlierCodec(self.recipe, self.frames)
        self._earlier, self.frames, self.recipe = [replaced, *self._earlier], frames, recipe
        replaced.frames.newest.forget()

    def release_earlier(self) -> None:
        """Forget what earlier codecs stored and nobody needs any more."""
        if self._earlier:
            oldest = self._oldest()
            for _, frames in self._earlier:
                frames.release(oldest)
            self._earlier = [earlier for earlier in self._earlier if (oldest < earlier.frames.heads).any()]

    def renumber(self) -> None:
        """Let frames be counted from lower numbers, before an entry of the index cannot hold them any more."""
        frames = self.frames
        group = frames.codec.frames_per_record
        # A number may change by what leaves it at its place in the ring and in the index.
        period = math.lcm(frames.starts.shape[1] * group, frames.ring.shape[1])
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
        """Store everything anew, in the order in which it came."""
        before = self.layout, self.recipe, self.frames, self.ends, self._earlier
        old_layout, old_ends = self.layout, self.ends
        stores, slots = self.frame_stores, self._by_age(*self.ends)
        try:
            self.use(layout, recipe)
            # Not zeros_like(), which would write to all of it, and so take its memory.
            self.ends = [self._make_zeros(ends.shape, ends.dtype) for ends in old_ends]
            self._earlier = []
            for slot in slots.tolist():
                for column, ends in enumerate(old_ends):
                    lanes = np.flatnonzero(ends[slot])
                    if len(lanes):
                        found = np.empty((len(lanes), *self.shape), dtype=self.stored_dtype)
                        firsts = ends[slot, lanes].astype(np.int64) - old_layout.stack
                        gather_observations(stores, old_layout, lanes, firsts[None], [found])
                        self.ends[column][slot, lanes] = self.frames.append(lanes, found, self._oldest)
        except BaseException:
            self.layout, self.recipe, self.frames, self.ends, self._earlier = before
            raise

    def compact(self) -> None:
        """Store everything anew if most of the arena is dead, as when slots are overwritten in no order.

        Written in turns, as buffers do it, slots free the arena from its old end on, and this finds nothing to do.
        """
        live_frames = frames_in_use([ends[: self.slots_used] for ends in self.ends], self.layout.stack)
        if 2 * float(live_frames @ self.frames.mean_frame_bytes()) < self.frames.arena.live_bytes:
            self.rebuild(self.layout, self.recipe)
        self._compact_at = max(_WORTH_COMPACTING, self.frames.arena.nbytes * 5 // 4)

    def state(self) -> State:
        """For :mod:`sb3_extra_buffers.persistence`."""
        return {
            "layout": {"stack": self.layout.stack, "axis": self.layout.axis},
            **self.recipe.state(),
            "compact_at": self._compact_at,
            "ends": {str(column): ends for column, ends in enumerate(self.ends)},
            "digests": {} if self.digests is None else self.digests.state(),
            "frames": self.frames.state(),
            "earlier": {
                str(i): {**recipe.state(), "frames": frames.state()} for i, (recipe, frames) in enumerate(self._earlier)
            },
        }

    def restore(self, state: SavedState) -> None:
        """Take over what :meth:`state` gave, in a store that was made with the same arguments."""
        self._compact_at = state.integer("compact_at", _WORTH_COMPACTING)
        layout = self._restored_layout(state.part("layout"))
        parts = state.part("earlier").parts() if state.has("earlier") else []
        self._earlier = []
        for part in parts:
            self.use(layout, CodecRecipe.restored(part))
            self.frames.restore(part.part("frames"))
            self._earlier.append(EarlierCodec(self.recipe, self.frames))
        self.use(layout, CodecRecipe.restored(state))
        self.frames.restore(state.part("frames"))
        self._restore_columns(state.part("ends"), self.ends)
        self.slots_used = self.n_slots
        self._restore_digests(state)
        try:
            self.check()
        except CorruptDataError as error:
            raise state.error("frames", f"contradicts itself: {error}") from error

    def _restore_digests(self, state: SavedState) -> None:
        # Observations that were saved without have nothing to be compared with.
        if self.digests is not None and state.has("digests") and state.part("digests").array_names():
            self._restore_columns(state.part("digests"), self.digests.columns)

    def _restore_columns(self, state: SavedState, columns: list[npt.NDArray[Any]]) -> None:
        for column, fresh in enumerate(columns):
            saved = state.array(str(column), fresh.dtype, fresh.shape)
            if self._make_zeros is np.zeros:
                columns[column] = saved
            else:
                fresh[:] = saved

    def _restored_layout(self, state: SavedState) -> StackLayout:
        stack, axis = state.integer("stack", 1, MAX_STACK), state.value("axis")
        if axis not in ("first", "last") or (stack > 1 and self.shape[0 if axis == "first" else -1] % stack):
            raise state.error("stack", f"is {stack} along the {axis!r} axis of observations of shape {self.shape}")
        return StackLayout(self.shape, self.stored_dtype, stack, axis)

    def _cast(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """To the dtype of the space, as SB3 does it, unless that would make other numbers of them."""
        if np.can_cast(array.dtype, self.dtype, "same_kind"):
            return array.astype(self.dtype)
        if array.dtype.kind in "biuf":
            with np.errstate(invalid="ignore"):
                cast = array.astype(self.dtype)
            if np.array_equal(cast, array):
                return cast
        raise ObservationError(
            f"Observations of dtype {array.dtype} do not fit a space of dtype {self.dtype}: storing them would "
            "change values. Give the observation space the dtype that the environment returns."
        )

    def _firsts(self, wanted: list[tuple[int, Indices]], envs: Indices) -> Indices:
        """The first frame of each observation, (columns, n); below zero where there is none."""
        firsts = np.empty((len(wanted), len(envs)), dtype=np.int64)
        for row, (column, slots) in zip(firsts, wanted, strict=True):
            row[:] = self.ends[column].reshape(-1).take(slots * self.n_envs + envs)  # faster than [slots, envs]
        firsts -= self.layout.stack
        return firsts

    def _read_with_gaps(self, lanes: Indices, firsts: Indices, outs: list[npt.NDArray[Any]]) -> None:
        for first, out in zip(firsts, outs, strict=True):
            written = first >= 0
            out[~written] = 0
            if written.any():
                found = np.empty((int(written.sum()), *self.shape), dtype=self.stored_dtype)
                gather_observations(self.frame_stores, self.layout, lanes[written], first[written][None], [found])
                out[written] = found

    def _oldest(self) -> Indices:
        """The oldest frame of each lane that an observation still needs."""
        # In pieces: passing arrays as large as the index would leave holes in the process's memory.
        # Less one, so that "never written" becomes the largest number instead of the smallest.
        used = max(self.slots_used, 1)
        pieces = (ends[i : min(i + _PIECE, used)] for ends in self.ends for i in range(0, used, _PIECE))
        oldest_ends = np.stack([(piece - np.uint32(1)).min(axis=0) for piece in pieces]).min(axis=0)
        oldest: Indices = oldest_ends.astype(np.int64) + 1 - self.layout.stack
        return oldest

    def _make_frames(self, layout: StackLayout, recipe: CodecRecipe, begin_after: Indices | None = None) -> FrameStore:
        return FrameStore(
            recipe.build(layout.frame),
            self.n_envs,
            layout,
            self._make_arena(),
            observations_at_once=2,  # what a step of a replay buffer brings
            begin_after=begin_after,
        )

    def _by_age(self, *columns: npt.NDArray[np.uint32]) -> Indices:
        """Slots that hold something in one of the columns, the one written first in front."""
        newest = np.max([ends[: self.slots_used].max(axis=1) for ends in columns], axis=0)
        slots = np.flatnonzero(newest)
        return slots[np.argsort(newest[slots], kind="stable")]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_make_arena": Arena, "_make_zeros": np.zeros}  # a copy is in memory

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A pickle of an earlier version has other names for some attributes, and lacks others.
        renamed = {"_recipe": "recipe", "_slots_used": "slots_used"}
        state = {renamed.get(name, name): value for name, value in state.items()}
        lacking: dict[str, Any] = {"digests": None, "_earlier": [], "_has_elements": True}
        lacking |= {"_reconsider_at": None, "_forgotten": []}
        step_shape = (state["n_envs"], *state["shape"])
        self.__dict__.update({**lacking, "_step_shape": step_shape, "lock": state.get("lock") or BufferLock(), **state})
