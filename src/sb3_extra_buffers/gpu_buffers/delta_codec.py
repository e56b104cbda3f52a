"""``delta`` for frames that are encoded many at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sb3_extra_buffers.codecs.base import FrameSpec, Indices
from sb3_extra_buffers.codecs.delta import DeltaCodec, Words
from sb3_extra_buffers.codecs.references import UseCounts

if TYPE_CHECKING:
    from sb3_extra_buffers.persistence.state import SavedState, State

_LOOK_AFTER = 8
"""Records per lane between two looks at how well its reference fits."""


class _LoggedUseCounts(UseCounts):
    """Remembers which references are new, and so not on the device yet."""

    def __init__(self) -> None:
        super().__init__()
        self.new_numbers = [0]

    def new(self) -> int:
        number = super().new()
        self.new_numbers.append(number)
        return number


class BatchDeltaCodec(DeltaCodec):
    """The same bytes. In one call, a lane may have several records, which must then follow each other."""

    def __init__(self, frame: FrameSpec, *, frames_per_record: int = 1) -> None:
        super().__init__(frame, frames_per_record=frames_per_record)
        self._uses: _LoggedUseCounts = _LoggedUseCounts()
        self._unseen = 0
        """Records that were encoded since it was last seen how well references fit."""

    @property
    def reference_frames(self) -> Words:
        return self._frames

    def take_new_references(self) -> Indices:
        """The numbers of reference frames that were written since the last call."""
        numbers = np.unique(np.array(self._uses.new_numbers, dtype=np.int64))
        self._uses.new_numbers.clear()
        return numbers

    def forget_what_was_taken(self) -> None:
        """All reference frames count as new."""
        self._uses.new_numbers[:] = range(len(self._frames))

    def state(self) -> State:
        return {**super().state(), "unseen": self._unseen}

    def restore(self, state: SavedState) -> None:
        super().restore(state)
        self._unseen = state.integer("unseen")
        self.forget_what_was_taken()

    def _choose_references(self, first_frames: Words, lanes: Indices) -> Indices:
        self._make_room_for_lanes(int(lanes[-1]) + 1)
        self._unseen += len(lanes)
        if self._unseen >= _LOOK_AFTER * len(self._current) or not self._current[lanes].all():
            self._review_references(first_frames, lanes)
            self._unseen = 0
        references = self._current[lanes]
        self._uses.take(references)
        return references

    def _review_references(self, first_frames: Words, lanes: Indices) -> None:
        """See how well references fit, and renew them where they do not."""
        begins = np.flatnonzero(np.diff(lanes, prepend=-1))
        own_lanes, ends = lanes[begins], np.append(begins[1:], len(lanes))
        # The newest frame of each lane stands for all of them.
        newest = first_frames[ends - 1]
        alone = (ends - begins == 1)[:, None]
        before = np.where(alone, self._previous[own_lanes], first_frames[np.maximum(ends - 2, 0)])
        changes = np.count_nonzero(newest != self._frames[self._current[own_lanes]], axis=1)
        recent_changes = np.count_nonzero(newest != before, axis=1)
        self._previous[own_lanes] = newest
        # Frames of zeros, which fill up stacks after a reset, say nothing about the scene.
        saved = np.maximum(5 * (changes - recent_changes), 0) * newest.any(axis=1)
        self._regret[own_lanes] += saved * (self._unseen // len(own_lanes))
        for row in np.flatnonzero((self._regret[own_lanes] > self.frame.nbytes) & (saved > 0)).tolist():
            self._renew(own_lanes[row], newest[row])

    def _renew(self, lane: np.int64, frame: Words) -> None:
        """Make a frame the reference of a lane."""
        self._uses.drop(self._current[[lane]])
        self._current[lane] = number = self._uses.new()
        if number >= len(self._frames):
            self._frames = np.concatenate([self._frames, np.zeros((4, self._n_words), dtype=np.uint32)])
        self._frames[number] = frame
        self._regret[lane] = 0
