"""Observations as plain rows of an array, for vectors and other small observations.

Compressing them would cost more time than it saves memory. Still, they take about half of what SB3's buffer takes,
because the next observation of a step usually is the observation of the step after, and that is stored once::

    row 0           zeros: what was never written
    rows 1 to n     the observations, slot after slot
    2 * n_envs      the next observations of the newest step; two blocks that take turns
    the rest        next observations that are no observation: at the ends of episodes, mostly

For every next observation, an index has its row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.base_store import CPU, BaseStore
from sb3_extra_buffers.storage.choice import SMALLEST_FRAME
from sb3_extra_buffers.storage.config import StorageConfig
from sb3_extra_buffers.storage.digests import Digests
from sb3_extra_buffers.storage.memory import zeros
from sb3_extra_buffers.storage.observation_store import ObservationStore

_LARGEST_VECTOR = 4096
_LARGEST_IMAGE = 192
"""In bytes."""
_PIECE = 1 << 12

Appended = tuple[Sequence[npt.NDArray[Any]], Sequence[Digests] | None]


def suits(config: StorageConfig, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether observations like these are stored as plain rows, if they are in memory."""
    if config.recipe is not None and config.recipe.method.name != "none":
        return False
    if config.frame_stack not in ("auto", None, 1):  # frames that observations share take less memory
        return False
    size = math.prod(shape) * (config.elem_type or dtype).itemsize
    if config.recipe is None and config.prefer == "memory" and size >= SMALLEST_FRAME:
        return False
    return size <= (_LARGEST_VECTOR if len(shape) <= 1 else _LARGEST_IMAGE)


class PlainStore(BaseStore):
    """Observations as they are. See the module's description."""

    def __init__(self, n_slots: int, n_envs: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(n_slots, n_envs, *args, **kwargs)
        n, size = n_slots * n_envs, math.prod(self.shape)
        shares = self.n_columns == 2
        self._first_own = n + 1
        """Rows from this one on belong to one next observation each."""
        self._first_free = n + 1 + (2 * n_envs if shares else 0)
        # Enough for all next observations, and for those of a step that is being replaced. Memory that is never written
        # is never taken.
        self._rows = zeros((self._first_free + (n + 3 * n_envs if shares else 0), size), self.stored_dtype)
        self._observed = self._rows[1 : n + 1].reshape(n_slots, *self._step_shape)
        self._next_rows = zeros((n_slots if shares else 0, n_envs), np.dtype(np.uint32))
        self._flat_next_rows = self._next_rows.reshape(-1)
        self._envs = np.arange(n_envs)
        self._has_own_rows = np.zeros(n_slots if shares else 0, dtype=np.bool_)
        """Of each slot: whether it may have rows after ``_first_free``."""
        blocks = [self._first_own + turn * n_envs for turn in (0, 1)] if shares else []
        self._blocks = [self._rows[first : first + n_envs].reshape(self._step_shape) for first in blocks]
        self._block_rows = [first + self._envs for first in blocks]
        if self.config.recipe is None:
            self.choice = f"plain rows are the fastest for {size} numbers, and half of SB3's memory"
        self._forget()

    def _forget(self) -> None:
        self._newest: int | None = None
        """The slot whose next observations are in a block."""
        self._turn = 0
        """Which block."""
        self._newest_bytes: bytes | None = None
        """The contents of that block, which are fast to compare, if they are known."""
        self._free_rows: list[int] = []
        self._n_own = 0
        """How many rows after ``_first_free`` have been in use."""

    @property
    def label(self) -> str:
        return "none" if self.config.recipe else "none (auto)"

    @property
    def payload_bytes(self) -> int:
        n_rows = self.slots_used * self.n_envs + (self._first_free - self._first_own) + self._n_own
        return n_rows * math.prod(self.shape) * self.stored_dtype.itemsize

    @property
    def reference_bytes(self) -> int:
        return 0

    def index_bytes(self, filled: float) -> int:
        digests = self.digests.nbytes if self.digests else 0
        return round(filled * (self._next_rows.nbytes + self._has_own_rows.nbytes + digests))

    def prepare(self, n_observations: int, slot: int | None = None) -> None:
        n_left = len(self._rows) - self._first_free - self._n_own
        if self.n_columns == 2 and len(self._free_rows) + n_left < 2 * self.n_envs:
            self._find_free_rows()

    def append(self, observations: Sequence[npt.NDArray[Any]], lanes: Indices | None = None) -> Appended:
        return observations, self._digests_of(observations)

    def place(self, places: Sequence[tuple[int, int]], appended: Appended, lanes: Indices | None = None) -> None:
        observations, digests = appended
        slot = places[0][1]
        if slot >= self.slots_used:
            self.slots_used = slot + 1
        if len(places) == 2 and self.n_columns == 2:
            self._place_step(slot, *observations)
        else:
            where = self._envs if lanes is None else lanes
            for (column, slot), values in zip(places, observations, strict=True):
                self.slots_used = max(self.slots_used, slot + 1)
                (self._place_next if column else self._place_observation)(slot, where, values)
        if digests is not None:
            self._place_digests(places, digests, lanes)

    def _place_step(self, slot: int, observations: npt.NDArray[Any], following: npt.NDArray[Any]) -> None:
        """Store a step of all environments. If this is interrupted, it can be called again."""
        previous = (slot or self.n_slots) - 1
        if self._newest == previous != slot:
            first = slot * self.n_envs + 1
            self._next_rows[previous] = np.arange(first, first + self.n_envs)
            contents = observations.tobytes()
            if contents != self._newest_bytes:
                self._keep_unequal(previous, contents)
        else:  # the first step, or not in turn
            self._keep_newest(slot)
            self._unshare(slot, self._envs)
        freed = self._own_rows(slot) if self._has_own_rows[slot] else []
        turn = 1 - self._turn
        self._observed[slot] = observations
        self._blocks[turn][...] = following
        contents = following.tobytes()
        self._next_rows[slot] = self._block_rows[turn]
        self._has_own_rows[slot] = False
        # From here on, an interrupted step is complete.
        self._newest, self._turn, self._newest_bytes = slot, turn, contents
        self._free_rows += freed

    def _keep_unequal(self, previous: int, observations: bytes) -> None:
        """Give a row of its own to each next observation of the step before that is not the observation of this one.

        Bytes are compared: NaN must equal itself, and 0.0 is not -0.0.
        """
        block = self._blocks[self._turn]
        before = block.tobytes() if self._newest_bytes is None else self._newest_bytes
        size = max(len(before) // self.n_envs, 1)
        for lane, at in enumerate(range(0, len(before), size)):
            if observations[at : at + size] != before[at : at + size]:
                (row,) = self._new_rows(1)
                self._rows[row] = block[lane].reshape(-1)
                self._has_own_rows[previous] = True
                self._next_rows[previous, lane] = row

    def _keep_newest(self, slot: int) -> None:
        """Give rows of their own to the next observations of the newest step, unless ``slot`` is that step."""
        if self._newest is not None and self._newest != slot:
            in_block = self._next_rows[self._newest] == self._block_rows[self._turn]
            self._give_rows(self._newest, self._envs[in_block])

    def _unshare(self, slot: int, lanes: Indices) -> None:
        """Before observations change: the step before must not change with them."""
        if self.n_columns == 2:
            previous = (slot or self.n_slots) - 1
            shared = self._next_rows[previous, lanes] == slot * self.n_envs + 1 + lanes
            self._give_rows(previous, lanes[shared])

    def _give_rows(self, slot: int, lanes: Indices) -> None:
        """Copy next observations of a slot to rows of their own."""
        if len(lanes):
            rows = self._new_rows(len(lanes))
            self._rows[rows] = self._rows[self._next_rows[slot, lanes]]
            self._has_own_rows[slot] = True
            self._next_rows[slot, lanes] = rows

    def _place_observation(self, slot: int, lanes: Indices, values: npt.NDArray[Any]) -> None:
        self._unshare(slot, lanes)
        self._observed[slot, lanes] = values

    def _place_next(self, slot: int, lanes: Indices, values: npt.NDArray[Any]) -> None:
        rows = self._next_rows[slot, lanes].astype(np.int64)
        lacking = np.flatnonzero(rows < self._first_own)
        rows[lacking] = self._new_rows(len(lacking))
        if slot == self._newest:
            self._newest_bytes = None
        self._rows[rows] = values.reshape(len(lanes), self._rows.shape[1])
        self._has_own_rows[slot] = True
        self._next_rows[slot, lanes] = rows

    def _new_rows(self, n: int) -> list[int]:
        """Rows that nothing refers to. :meth:`prepare` made sure that there are enough."""
        rows = [self._free_rows.pop() for _ in range(min(n, len(self._free_rows)))]
        first = self._first_free + self._n_own
        self._n_own += n - len(rows)
        return [*rows, *range(first, self._first_free + self._n_own)]

    def _own_rows(self, slot: int) -> list[int]:
        rows = self._next_rows[slot]
        own: list[int] = rows[rows >= self._first_free].tolist()
        return own

    def _find_free_rows(self) -> None:
        """Search for rows that nothing refers to any more. Only interrupted steps lose track of some."""
        in_use = self._flat_next_rows[self._flat_next_rows >= self._first_free]
        free = np.ones(len(self._rows) - self._first_free, dtype=np.bool_)
        free[in_use.astype(np.int64) - self._first_free] = False
        self._free_rows, self._n_own = (np.flatnonzero(free) + self._first_free).tolist(), len(free)

    def _fill(self, wanted: list[tuple[int, Indices]], envs: Indices, outs: list[npt.NDArray[Any]]) -> None:
        for (column, slots), out in zip(wanted, outs, strict=True):
            places = slots * self.n_envs
            places += envs
            rows = self._flat_next_rows.take(places) if column else np.add(places, 1, out=places)
            # Rows are in range. "clip" only spares NumPy a copy that would leave ``out`` unchanged after an error.
            self._rows.take(rows, axis=0, out=out.reshape(len(rows), self._rows.shape[1]), mode="clip")

    def clear(self) -> None:
        with self.lock.held:
            self._next_rows[: self.slots_used] = 0
            self._observed[: self.slots_used] = 0
            self._has_own_rows[: self.slots_used] = False
            if self.digests is not None:
                self.digests.clear(self.slots_used)
            self.slots_used = 0
            self._forget()

    def check(self) -> None:
        with self.lock.held:
            for first in range(0, self.slots_used if self.n_columns == 2 else 0, _PIECE):
                self._check_next_rows(np.arange(first, min(first + _PIECE, self.slots_used)))
            own = self._flat_next_rows[self._flat_next_rows >= self._first_own]
            if len(np.unique(own)) != len(own):
                raise CorruptDataError("Two next observations have the same row.")
            if not set(self._free_rows).isdisjoint(own.tolist()):
                raise CorruptDataError("A row that is in use counts as free.")
            if self._newest_bytes is not None and self._newest_bytes != self._blocks[self._turn].tobytes():
                raise CorruptDataError("The newest next observations are not the stored ones.")
            if self._rows[0].any():
                raise CorruptDataError("The row of observations that were never written is not zero.")

    def _check_next_rows(self, slots: Indices) -> None:
        rows = self._next_rows[slots].astype(np.int64)
        exists = (rows == 0) | (rows == (slots[:, None] + 1) % self.n_slots * self.n_envs + 1 + self._envs)
        exists |= (rows >= self._first_free) & (rows < self._first_free + self._n_own) & self._has_own_rows[slots, None]
        if self._newest is not None:
            exists[slots == self._newest] |= rows[slots == self._newest] == self._block_rows[self._turn]
        if not exists.all():
            slot, env = np.argwhere(~exists)[0].tolist()
            raise CorruptDataError(
                f"The next observation in slot {slots[slot]}, environment {env} is in row {rows[slot, env]}, which is "
                "none of its own."
            )

    def state(self) -> State:
        used = self.slots_used
        return {
            "slots_used": used,
            "observations": self._observed[:used],
            "next_rows": self._next_rows[:used],
            "own_rows": self._rows[self._first_own : self._first_free + self._n_own],
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
        self._n_own = len(own) - (self._first_free - self._first_own)
        if not 0 <= self._n_own <= len(self._rows) - self._first_free:
            raise state.error("own_rows", f"has {len(own)} rows")
        self._rows[self._first_own : self._first_own + len(own)] = own
        self._next_rows[: used if shares else 0] = state.array(
            "next_rows", np.uint32, (used if shares else 0, self.n_envs)
        )
        self._has_own_rows[:] = (self._next_rows >= self._first_free).any(axis=1)
        self._newest = state.integer("newest", 0, self.n_slots - 1) if state.has("newest") else None
        self._turn = state.integer("turn", 0, 1)
        self.slots_used = used
        self._restore_digests(state)
        try:
            self.check()
        except CorruptDataError as error:
            raise state.error("next_rows", f"contradicts itself: {error}") from error
        in_use = set(self._flat_next_rows[self._flat_next_rows >= self._first_free].tolist())
        self._free_rows = [row for row in range(self._first_free, self._first_free + self._n_own) if row not in in_use]

    def _restore_frames(self, state: SavedState) -> None:
        """Versions up to 1.0.0.dev0 stored small observations as frames, too."""
        earlier = ObservationStore(
            self.n_slots, self.n_envs, self.shape, self.dtype, self.config, self.n_columns, verify=bool(self.digests)
        )
        earlier.restore(state)
        for slot in earlier.slots_by_age().tolist():
            slots = np.full(self.n_envs, slot)
            columns = list(range(self.n_columns))
            steps = earlier.read_stored([(column, slots) for column in columns], np.arange(self.n_envs), CPU)
            self.place([(column, slot) for column in columns], (steps, None))
        if self.digests is not None and earlier.digests is not None:
            self.digests = earlier.digests
