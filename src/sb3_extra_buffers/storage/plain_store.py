"""Observations as plain rows of an array, for vectors and other small observations.

Compressing them would take too much time for the memory that it saves. Still, they take less than SB3's arrays, because
the next observation of a step usually is the observation of the following step, and is only stored once::

    row 0           zeros, for places that were never written
    rows 1 to n     the observations, slot after slot
    2 * n_envs      the next observations of the newest step; two blocks that take turns
    the rest        next observations that differ from the following observation, mostly at the ends of episodes

An index stores the row of every next observation. The newest step is special: the index already has the rows of the
next slot for it, where its next observations are usually going to be. Until the next step, they are in a block.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.anonymous_memory import zeros
from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.base_store import CPU, BaseStore
from sb3_extra_buffers.storage.choice import SMALLEST_FRAME
from sb3_extra_buffers.storage.config import StorageConfig
from sb3_extra_buffers.storage.digests import Digests, digests_of
from sb3_extra_buffers.storage.observation_store import ObservationStore

_LARGEST_VECTOR = 4096
_LARGEST_IMAGE = 192
"""In bytes. Larger observations are stored as frames."""
_PIECE = 1 << 12
_FEW_ENVS = 16
"""For the rows of up to this many environments, comparing them one by one takes less time than a call of NumPy."""

Appended = tuple[Sequence[npt.NDArray[Any]], Sequence[Digests] | None]
_Step = tuple[bytes, bytes, Sequence[Digests] | None]
"""Observations and next observations of a step as bytes, which are fast to compare and to copy, and their checksums."""


def suits(config: StorageConfig, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether observations like these are stored as plain rows, if they are in memory."""
    if config.recipe is not None and config.recipe.method.name != "none":
        return False
    if config.frame_stack not in ("auto", None, 1):  # stacked observations share frames, which saves more
        return False
    size = math.prod(shape) * (config.elem_type or dtype).itemsize
    if config.recipe is None and config.prefer == "memory" and size >= SMALLEST_FRAME:
        return False
    return size <= (_LARGEST_VECTOR if len(shape) <= 1 else _LARGEST_IMAGE)


class PlainStore(BaseStore):
    """Observations without compression. See the module's description."""

    def __init__(self, n_slots: int, n_envs: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(n_slots, n_envs, *args, **kwargs)
        n, size = n_slots * n_envs, math.prod(self.shape)
        shares = self.n_columns == 2
        self._envs = np.arange(n_envs)
        self._blocks_start = n + 1
        """The first row of the two blocks for the next observations of the newest step."""
        self._own_start = n + 1 + (2 * n_envs if shares else 0)
        """The first row that belongs to a single next observation."""
        # Enough for all next observations, and for those of a step that is being replaced. Rows that are never written
        # take no memory.
        self._rows = zeros((self._own_start + (n + 3 * n_envs if shares else 0), size), self.stored_dtype)
        self._observed = self._rows[1 : n + 1].reshape(n_slots, *self._step_shape)
        self._next_rows = zeros((n_slots if shares else 0, n_envs), np.dtype(np.uint32))
        self._flat_next_rows = self._next_rows.reshape(-1)
        # The same memory as bytes: copying bytes to it takes half as long as assigning to an array.
        self._bytes = self._rows.reshape(-1).view(np.uint8).data
        self._index_bytes = self._flat_next_rows.view(np.uint8).data
        self._row_bytes = size * self.stored_dtype.itemsize
        self._step_bytes = n_envs * self._row_bytes
        self._parts = [slice(env * self._row_bytes, (env + 1) * self._row_bytes) for env in range(n_envs)]
        """Where the row of each environment is in the bytes of a step."""
        self._word = next(
            word for word in (np.uint64, np.uint32, np.uint16, np.uint8) if not self._row_bytes % word().itemsize
        )
        """The widest integer whose size divides a row: rows are compared word by word."""
        in_blocks = [self._blocks_start * self._row_bytes + turn * self._step_bytes for turn in (0, 1)]
        self._in_block = [slice(first, first + self._step_bytes) for first in in_blocks]
        self._first_numbers, self._ones = (
            int.from_bytes(numbers.astype(np.uint32).tobytes(), sys.byteorder)
            for numbers in (self._envs, np.ones(n_envs))
        )
        self._fast_dtype = self.dtype if self.stored_dtype == self.dtype else None
        """Observations of this dtype need no conversion."""
        if self.config.recipe is None:
            self.choice = f"plain rows are the fastest for {size} numbers, and next observations are shared"
        self._forget()

    def _forget(self) -> None:
        self._newest: int | None = None
        """The slot whose next observations are in a block."""
        self._turn = 0
        """Which of the two blocks that is."""
        self._newest_bytes: bytes | None = None
        """The contents of that block, if they are known."""
        self._all_shared = bytearray(len(self._next_rows))
        """For each slot, 1 if its next observations are known to be the next slot's observations, as in most slots."""
        self._free_rows: list[int] = []
        self._n_own = 0
        """How many rows from ``_own_start`` on have ever been in use."""

    @property
    def label(self) -> str:
        return "none" if self.config.recipe else "none (auto)"

    @property
    def payload_bytes(self) -> int:
        n_rows = self.slots_used * self.n_envs + (self._own_start - self._blocks_start) + self._n_own
        return n_rows * self._row_bytes

    @property
    def reference_bytes(self) -> int:
        return 0

    def index_bytes(self, filled: float) -> int:
        digests = self.digests.nbytes if self.digests else 0
        return round(filled * (self._next_rows.nbytes + len(self._all_shared) + digests))

    def checked_pair(self, observations: npt.ArrayLike, following: npt.ArrayLike) -> _Step:
        if (
            not type(observations) is type(following) is np.ndarray
            or not observations.dtype is following.dtype is self._fast_dtype
            or not observations.shape == following.shape == self._step_shape
        ):
            observations, following = self.checked(observations), self.checked(following)
        digests = None if self.digests is None else [digests_of(observations), digests_of(following)]
        return observations.tobytes(), following.tobytes(), digests

    def stage(self, slot: int, pair: _Step) -> _Step:
        return pair

    def prepare(self, n_observations: int, slot: int | None = None) -> None:
        """Do nothing: there is always room."""

    def append(self, observations: Sequence[npt.NDArray[Any]], lanes: Indices | None = None) -> Appended:
        return observations, self._digests_of(observations)

    def place_step(self, slot: int, staged: _Step) -> None:
        observations, following, digests = staged
        if self.n_columns == 1:
            pair = [
                np.frombuffer(part, self.stored_dtype).reshape(self._step_shape) for part in (observations, following)
            ]
            super().place_step(slot, (pair, digests))
            return
        if slot >= self.slots_used:
            self.slots_used = slot + 1
        previous = (slot or self.n_slots) - 1
        if self._newest != previous or previous == slot:  # the first step, or not in turn
            self._keep_newest(slot)
            self._unshare(slot, self._envs)
        elif observations != self._newest_bytes:
            self._keep_unequal(previous, observations)
        n_bytes, turn, freed = self._step_bytes, 1 - self._turn, None
        start = self._row_bytes + slot * n_bytes
        if not self._all_shared[slot]:
            freed = self._own_rows(slot)
            first = 4 * slot * self.n_envs
            self._index_bytes[first : first + 4 * self.n_envs] = self._rows_after(slot)
            self._all_shared[slot] = 1
        self._bytes[start : start + n_bytes] = observations
        self._bytes[self._in_block[turn]] = following
        # From here on, an interrupted step is complete.
        self._newest, self._turn, self._newest_bytes = slot, turn, following
        if freed:
            self._free_rows += freed
        if digests is not None:
            self._place_digests([(0, slot), (1, slot)], digests)

    def _rows_after(self, slot: int) -> bytes:
        """The index entries that name all rows of the next slot, as bytes. This is faster than NumPy."""
        first = (slot + 1) % self.n_slots * self.n_envs + 1
        return (first * self._ones + self._first_numbers).to_bytes(4 * self.n_envs, sys.byteorder)

    def place(self, places: Sequence[tuple[int, int]], appended: Appended, lanes: Indices | None = None) -> None:
        where = self._envs if lanes is None else lanes
        observations, digests = appended
        for (column, slot), values in zip(places, observations, strict=True):
            self.slots_used = max(self.slots_used, slot + 1)
            (self._place_next if column else self._place_observation)(slot, where, values)
        self._place_digests(places, digests, lanes)

    def is_shared(self, previous: int, slot: int) -> npt.NDArray[np.bool_]:
        shared: npt.NDArray[np.bool_] = self._next_rows[previous] == slot * self.n_envs + 1 + self._envs
        return shared

    def _keep_unequal(self, previous: int, observations: bytes) -> None:
        """Give rows of their own to the next observations of the previous step that differ from these observations.

        Bytes are compared: NaN must equal itself, and 0.0 is not -0.0.
        """
        newest, size = self._newest_bytes, self._row_bytes
        if newest is None:
            newest = self._block().tobytes()
        if self.n_envs <= _FEW_ENVS:
            unequal = [env for env, part in enumerate(self._parts) if observations[part] != newest[part]]
        else:
            before, now = (np.frombuffer(part, self._word).reshape(self.n_envs, -1) for part in (newest, observations))
            unequal = np.flatnonzero((before != now).any(axis=1)).tolist()
        for env in unequal:
            row = self._free_rows.pop() if self._free_rows else self._new_rows(1)[0]
            self._bytes[row * size : (row + 1) * size] = newest[self._parts[env]]
            self._all_shared[previous] = 0
            self._flat_next_rows[previous * self.n_envs + env] = row

    def _block(self) -> npt.NDArray[Any]:
        """The next observations of the newest step."""
        first = self._blocks_start + self._turn * self.n_envs
        return self._rows[first : first + self.n_envs]

    def _rows_of_block(self) -> Indices:
        """The rows of the next observations of the newest step."""
        rows: Indices = self._blocks_start + self._turn * self.n_envs + self._envs
        return rows

    def _keep_newest(self, slot: int) -> None:
        """Give rows of their own to the next observations of the newest step, unless ``slot`` is that step."""
        if self._newest is not None and self._newest != slot:
            self._give_rows(self._newest, self._envs, self._block())

    def _unshare(self, slot: int, lanes: Indices) -> None:
        """Before observations change, copy those that are next observations of the previous step, too."""
        previous = (slot or self.n_slots) - 1
        if self.n_columns == 2 and previous != self._newest:
            lanes = lanes[self._next_rows[previous, lanes] == slot * self.n_envs + 1 + lanes]
            self._give_rows(previous, lanes, self._observed[slot, lanes])

    def _give_rows(self, slot: int, lanes: Indices, values: npt.NDArray[Any]) -> None:
        """Give next observations of a slot rows of their own, and store ``values`` there."""
        if len(lanes):
            rows = self._new_rows(len(lanes))
            self._rows[rows] = values.reshape(len(lanes), self._rows.shape[1])
            self._all_shared[slot] = 0
            self._next_rows[slot, lanes] = rows

    def _place_observation(self, slot: int, lanes: Indices, values: npt.NDArray[Any]) -> None:
        self._unshare(slot, lanes)
        self._observed[slot, lanes] = values

    def _place_next(self, slot: int, lanes: Indices, values: npt.NDArray[Any]) -> None:
        if slot == self._newest:
            self._newest_bytes = None
            self._block()[lanes] = values.reshape(len(lanes), self._rows.shape[1])
            return
        rows = self._next_rows[slot, lanes].astype(np.int64)
        lacking = np.flatnonzero(rows < self._own_start)
        rows[lacking] = self._new_rows(len(lacking))
        self._rows[rows] = values.reshape(len(lanes), self._rows.shape[1])
        self._all_shared[slot] = 0
        self._next_rows[slot, lanes] = rows

    def _new_rows(self, n: int) -> list[int]:
        """Take ``n`` rows that nothing refers to."""
        if len(self._free_rows) + len(self._rows) - self._own_start - self._n_own < n:
            self._find_free_rows()
        rows = [self._free_rows.pop() for _ in range(min(n, len(self._free_rows)))]
        first = self._own_start + self._n_own
        self._n_own += n - len(rows)
        return [*rows, *range(first, self._own_start + self._n_own)]

    def _own_rows(self, slot: int) -> list[int]:
        return [row for row in self._next_rows[slot].tolist() if row >= self._own_start]

    def _find_free_rows(self) -> None:
        """Search for own rows that nothing refers to any more. Only interrupted steps lose track of them."""
        free = np.ones(self._n_own, dtype=np.bool_)
        free[self._rows_in_use() - self._own_start] = False
        self._free_rows = (np.flatnonzero(free) + self._own_start).tolist()

    def _rows_in_use(self) -> Indices:
        """The rows from ``_own_start`` on that the index refers to."""
        return self._flat_next_rows[self._flat_next_rows >= self._own_start].astype(np.int64)

    def _fill(self, wanted: list[tuple[int, Indices]], envs: Indices, outs: list[npt.NDArray[Any]]) -> None:
        first_slots = wanted[0][1]
        places_of_first = first_slots * self.n_envs + envs
        for (column, slots), out in zip(wanted, outs, strict=True):
            # Both columns usually have the same slots.
            places = places_of_first if slots is first_slots else slots * self.n_envs + envs
            if column:
                rows, is_newest = self._flat_next_rows.take(places), slots == self._newest
                if np.count_nonzero(is_newest):
                    rows[is_newest] = self._rows_of_block()[envs[is_newest]]
            else:
                rows = places + 1
            # Rows are in range. With "raise", NumPy would copy ``out`` first, to leave it unchanged after an error.
            self._rows.take(rows, axis=0, out=out.reshape(len(rows), self._rows.shape[1]), mode="clip")

    def clear(self) -> None:
        with self.lock.held, uninterrupted():
            self._next_rows[: self.slots_used] = 0
            self._observed[: self.slots_used] = 0
            if self.digests is not None:
                self.digests.clear(self.slots_used)
            self.slots_used = 0
            self._forget()

    def check(self) -> None:
        with self.lock.held:
            for first in range(0, self.slots_used if self.n_columns == 2 else 0, _PIECE):
                self._check_next_rows(np.arange(first, min(first + _PIECE, self.slots_used)))
            own = self._rows_in_use()
            if len(np.unique(own)) != len(own):
                raise CorruptDataError("Two next observations have the same row.")
            if not set(self._free_rows).isdisjoint(own.tolist()):
                raise CorruptDataError("A row that is in use counts as free.")
            if self._newest_bytes is not None and self._newest_bytes != self._block().tobytes():
                raise CorruptDataError("The newest next observations are not the stored ones.")
            if self._rows[0].any():
                raise CorruptDataError("The row of observations that were never written is not zero.")

    def _check_next_rows(self, slots: Indices) -> None:
        rows = self._next_rows[slots].astype(np.int64)
        is_shared = rows == (slots[:, None] + 1) % self.n_slots * self.n_envs + 1 + self._envs
        if not is_shared[np.frombuffer(self._all_shared, np.bool_)[slots]].all():
            raise CorruptDataError("A slot that counts as shared has a next observation with a row of its own.")
        exists = (rows == 0) | is_shared
        exists |= (rows >= self._own_start) & (rows < self._own_start + self._n_own)
        if not exists.all():
            slot, env = np.argwhere(~exists)[0].tolist()
            raise CorruptDataError(
                f"The next observation in slot {slots[slot]}, environment {env} is in row {rows[slot, env]}, which is "
                "none of its own."
            )

    def state(self) -> State:
        used, next_rows = self.slots_used, self._next_rows[: self.slots_used].copy()
        if self._newest is not None:
            next_rows[self._newest] = self._rows_of_block()
        return {
            "slots_used": used,
            "observations": self._observed[:used],
            "next_rows": next_rows,
            "own_rows": self._rows[self._blocks_start : self._own_start + self._n_own],
            "newest": self._newest,
            "turn": self._turn,
            "digests": {} if self.digests is None else self.digests.state(),
        }

    def restore(self, state: SavedState) -> None:
        if not state.has("slots_used"):
            self._restore_frames(state)
            return
        used = state.integer("slots_used", 0, self.n_slots)
        shares, size = self.n_columns == 2, self._rows.shape[1]
        self._observed[:used] = state.array("observations", self.stored_dtype, (used, *self._step_shape))
        own = state.array("own_rows", self.stored_dtype, (None, size))
        self._n_own = len(own) - (self._own_start - self._blocks_start)
        if not 0 <= self._n_own <= len(self._rows) - self._own_start:
            raise state.error("own_rows", f"has {len(own)} rows")
        self._rows[self._blocks_start : self._blocks_start + len(own)] = own
        self._next_rows[: used if shares else 0] = state.array(
            "next_rows", np.uint32, (used if shares else 0, self.n_envs)
        )
        self._newest = state.integer("newest", 0, used - 1) if state.has("newest") else None
        self._turn = state.integer("turn", 0, 1)
        self.slots_used = used
        if self._newest is not None:
            if (self._next_rows[self._newest] != self._rows_of_block()).any():
                raise state.error("newest", "is another slot than the index says")
            self._next_rows[self._newest] = np.frombuffer(self._rows_after(self._newest), np.uint32)
        self._restore_digests(state)
        try:
            self.check()
        except CorruptDataError as error:
            raise state.error("next_rows", f"contradicts itself: {error}") from error
        self._find_free_rows()

    def _restore_frames(self, state: SavedState) -> None:
        """Restore small observations that were stored as frames, as versions up to 1.0.0.dev0 did."""
        earlier = ObservationStore(
            self.n_slots, self.n_envs, self.shape, self.dtype, self.config, self.n_columns, verify=bool(self.digests)
        )
        earlier.restore(state)
        for slot in earlier.slots_by_age().tolist():
            slots = np.full(self.n_envs, slot)
            columns = list(range(self.n_columns))
            steps = earlier.read_stored([(column, slots) for column in columns], np.arange(self.n_envs), CPU)
            if self.n_columns == 2:
                self.place_step(slot, (steps[0].tobytes(), steps[1].tobytes(), None))
            else:
                self.place([(0, slot)], (steps, None))
        if self.digests is not None and earlier.digests is not None:
            self.digests = earlier.digests
