"""Reference counts of the frames or dictionaries that records are decoded with."""

from __future__ import annotations

import numpy as np

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.errors import CorruptDataError


class UseCounts:
    """Numbers for references, from 1 on, given out again once unused. Number 0 is "no reference" and always there."""

    def __init__(self) -> None:
        self._uses = np.ones(1, dtype=np.int64)

    def __len__(self) -> int:
        """How many numbers have been given out at the same time, 0 included."""
        return len(self._uses)

    def new(self) -> int:
        """A number that nobody uses, now used once."""
        free = np.flatnonzero(self._uses == 0)
        if len(free) == 0:
            free = np.array([len(self._uses)])
            self._uses = np.append(self._uses, 0)
        self._uses[free[0]] = 1
        return int(free[0])

    def take(self, references: Indices) -> None:
        np.add.at(self._uses, references, 1)

    def drop(self, references: Indices) -> Indices:
        """Take back one use of each, and return those that nobody uses any more."""
        np.subtract.at(self._uses, references, 1)
        self._uses[0] = 1
        candidates: Indices = np.unique(references)
        left = self._uses[candidates]
        if (left < 0).any():
            raise CorruptDataError(f"Reference {candidates[left.argmin()]} was released more often than it was used.")
        unused: Indices = candidates[left == 0]
        return unused

    def restart(self, size: int) -> None:
        """Begin anew with so many numbers, none of them used."""
        self._uses = np.zeros(size, dtype=np.int64)
        self._uses[0] = 1

    def unused(self) -> Indices:
        """The numbers that nobody uses."""
        return np.flatnonzero(self._uses == 0)

    def check(self, references: Indices) -> None:
        """Raise an error unless ``references`` are all the uses that there are."""
        expected = np.bincount(references, minlength=len(self._uses))
        expected[0] = self._uses[0]  # which is not counted
        if len(expected) > len(self._uses):
            raise CorruptDataError(f"Reference {len(expected) - 1} is in use but was never made.")
        (wrong,) = np.nonzero(expected != self._uses)
        if len(wrong):
            raise CorruptDataError(
                f"Reference {wrong[0]} counts {self._uses[wrong[0]]} uses, but has {expected[wrong[0]]}."
            )
