"""Where records are: the start, length and reference of each record of several lanes.

The records of a lane are numbered in the order of arrival. The oldest ones are released first, so the numbers of those
that exist are consecutive, and record ``r`` is at ``r % capacity`` in its lane's row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.anonymous_memory import zeros
from sb3_extra_buffers.codecs.base import Indices, Words
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.stacking import numbers_from

_PIECE = 1024
"""How many records of each lane are copied at a time when the index grows."""
_INT64, _UINT32 = np.dtype(np.int64), np.dtype(np.uint32)


class RecordIndex:
    """Room for ``capacity`` records of each lane.

    Once in use, its arrays are never replaced. When it is full, the store replaces the whole index by a larger one, in
    one assignment. So Ctrl-C can never leave arrays of different sizes.
    """

    def __init__(self, n_lanes: int, capacity: int) -> None:
        self.capacity = capacity
        self.starts: npt.NDArray[np.int64] = zeros((n_lanes, capacity), _INT64)
        self.lengths: Words = zeros((n_lanes, capacity), _UINT32)
        self.references: Words = zeros((n_lanes, capacity), _UINT32)
        self.has_references = False
        """Whether any record ever had a reference. Until then, ``references`` is not written, and takes no memory."""

    @classmethod
    def restored(cls, state: SavedState, n_lanes: int) -> RecordIndex:
        """Read what :meth:`state` returned."""
        starts = state.array("starts", _INT64, (n_lanes, None))
        index = cls(*starts.shape)
        index.starts, index.lengths = starts, state.array("lengths", _UINT32, starts.shape)
        index.has_references = state.has("references")
        if index.has_references:
            index.references = state.array("references", _UINT32, starts.shape)
        return index

    def state(self) -> State:
        references = {"references": self.references} if self.has_references else {}
        return {"starts": self.starts, "lengths": self.lengths, **references}

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + self.lengths.nbytes + (self.references.nbytes if self.has_references else 0)

    def places(self, lanes: Indices, numbers: Indices) -> Indices:
        """Where the records of these lanes and numbers are in the arrays; see :meth:`numpy.ndarray.take`."""
        return places_in(self.capacity, lanes, numbers)

    def entries(self, places: Indices) -> tuple[Indices, Indices, Indices]:
        """The starts, lengths and references of records."""
        lengths, references = self.lengths.take(places), self.references.take(places)
        return self.starts.take(places), lengths.astype(np.int64), references.astype(np.int64)

    def references_of(self, firsts: Indices, stops: Indices) -> Indices:
        """The references of the records ``firsts`` to ``stops - 1`` of each lane; empty if no record has one."""
        if not self.has_references:
            return np.zeros(0, dtype=np.int64)
        return self.references.take(self.places(*numbers_from(firsts, stops - firsts))).astype(np.int64)

    def write(self, lanes: Indices, numbers: Indices, starts: Indices, lengths: Indices, references: Indices) -> None:
        places = lanes, numbers % self.capacity
        self.starts[places] = starts
        self.lengths[places] = lengths
        self.has_references = self.has_references or bool(references.any())
        if self.has_references:
            self.references[places] = references

    def is_full(self, firsts: Indices, stops: Indices) -> bool:
        """Whether the records ``firsts`` to ``stops - 1`` of a lane leave no room for another one."""
        return bool((stops - firsts).max() >= self.capacity)

    def grown(self, firsts: Indices, stops: Indices) -> RecordIndex:
        """A larger index with the same records: ``firsts`` to ``stops - 1`` of each lane."""
        n_lanes, capacity = self.starts.shape
        larger = RecordIndex(n_lanes, capacity + max(capacity // 8, 8))
        larger.has_references = self.has_references
        if (stops <= capacity).all():  # every record keeps its place
            larger.starts[:, :capacity] = self.starts
            larger.lengths[:, :capacity] = self.lengths
            if self.has_references:
                larger.references[:, :capacity] = self.references
            return larger
        lanes = np.arange(n_lanes)[:, None]
        for i in range(0, capacity, _PIECE):  # in pieces, because the temporary arrays are larger than the copied part
            numbers = firsts[:, None] + np.arange(i, min(i + _PIECE, capacity))
            larger.write(lanes, numbers, *self.entries(self.places(lanes, numbers)))
        return larger


def places_in(capacities: int | Indices, lanes: Indices, numbers: Indices) -> Indices:
    """Where records are in the arrays of one index, or of several ones with a capacity for each record."""
    return lanes * capacities + numbers % capacities
