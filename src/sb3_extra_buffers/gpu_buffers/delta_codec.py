"""``delta`` for frames that are encoded many at a time."""

from __future__ import annotations

import numpy as np

from sb3_extra_buffers.codecs.base import FrameSpec, Indices, Words
from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import SavedState, State

_LOOK_AFTER = 8
"""Records per lane between two looks at how well its reference fits."""


class BatchDeltaCodec(DeltaCodec):
    """The same bytes. In one call, a lane may have several records, which must then follow each other."""

    def __init__(self, frame: FrameSpec, *, frames_per_record: int = 1) -> None:
        super().__init__(frame, frames_per_record=frames_per_record)
        self._unsent = [0]
        """Numbers of reference frames that are not on the device yet."""
        self._unseen = 0
        """Records that were encoded since it was last seen how well references fit."""

    @property
    def reference_frames(self) -> Words:
        return self._frames

    @property
    def uses(self) -> Indices:
        """By how many records and lanes each reference frame is used. Number 0 is none, and always there."""
        return self._uses._uses

    def unsent_references(self) -> Indices:
        """The numbers of reference frames that are not on the device yet."""
        return np.unique(np.array(self._unsent, dtype=np.int64))

    def all_sent(self) -> None:
        """All reference frames are on the device."""
        self._unsent = []

    def none_sent(self) -> None:
        """No reference frame is on the device."""
        self._unsent = list(range(len(self._frames)))

    def state(self) -> State:
        return {**super().state(), "unseen": self._unseen}

    def restore(self, state: SavedState) -> None:
        super().restore(state)
        self._unseen = state.integer("unseen")
        self.none_sent()

    def _choose_references(self, first_frames: Words, lanes: Indices) -> Indices:
        self._make_room_for_lanes(int(lanes[-1]) + 1)
        self._unseen += len(lanes)
        if self._unseen >= _LOOK_AFTER * len(self._current) or not self._current[lanes].all():
            self._review_references(first_frames, lanes)
            self._unseen = 0
        references = self._current[lanes]
        self._uses.incref(references)
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
        saved = (changes - recent_changes) * newest.any(axis=1)
        for row in self._weigh(own_lanes, saved, self._unseen // len(own_lanes)).tolist():
            with uninterrupted():
                number = self._new_reference(own_lanes[row])
                self._frames[number] = newest[row]
                self._unsent.append(number)

    # For frames that are on the device, all lanes at once

    def references_for(self, n_lanes: int) -> Indices:
        """The reference of each lane."""
        self._make_room_for_lanes(n_lanes)
        return self._current[:n_lanes].copy()

    @property
    def current(self) -> Indices:
        """The reference of each lane that has had one."""
        return self._current

    def most_references(self, more: int) -> int:
        """At most so many reference frames there will be after ``more`` were renewed."""
        return max(len(self._uses) + more, len(self._frames))

    def take_references(self, references: Indices) -> None:
        """Count uses by records that the device has encoded."""
        self._uses.incref(references)

    def lanes_to_renew(self, saved: Indices, n_records: Indices) -> Indices:
        """The lanes whose newest frame should become their reference.

        :param saved: How many words fewer it takes after the frame before it than after the reference.
        :param n_records: How many records it stands for.
        """
        return self._weigh(np.arange(len(saved)), saved, n_records)

    def renew(self, lanes: Indices) -> Indices:
        """New numbers for references whose frames are on the device, and not known here."""
        return np.array([self._new_reference(lane) for lane in lanes], dtype=np.int64)

    def _weigh(self, lanes: Indices, saved: Indices, n_records: Indices | int) -> Indices:
        """Note what newer references would have saved in the last records, and return which lanes want one."""
        saved = np.maximum(5 * saved, 0)
        self._regret[lanes] += saved * n_records
        return np.flatnonzero((self._regret[lanes] > self.frame.nbytes) & (saved > 0))

    def _new_reference(self, lane: np.int64) -> int:
        """Another number for the reference of a lane."""
        self._uses.decref(self._current[[lane]])
        self._current[lane] = number = self._uses.new()
        if number >= len(self._frames):
            self._frames = np.concatenate([self._frames, np.zeros((4, self._n_words), dtype=np.uint32)])
        self._regret[lane] = 0
        return number
