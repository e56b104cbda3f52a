"""Reference counts of the frames or dictionaries that records are decoded with."""

from __future__ import annotations

import numpy as np

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.errors import CorruptDataError


class UseCounts:
    """Reference counts. References have numbers from 1 on; unused numbers are given out again.

    Number 0 means "no reference". It is always in use.
    """

    def __init__(self) -> None:
        self._uses = np.ones(1, dtype=np.int64)

    def __len__(self) -> int:
        """The largest number ever used, plus one."""
        return len(self._uses)

    def new(self) -> int:
        """Return an unused number, and set its count to 1."""
        free = np.flatnonzero(self._uses == 0)
        if len(free) == 0:
            free = np.array([len(self._uses)])
            self._uses = np.append(self._uses, 0)
        self._uses[free[0]] = 1
        return int(free[0])

    def incref(self, references: Indices) -> None:
        np.add.at(self._uses, references, 1)

    def decref(self, references: Indices) -> Indices:
        """Decrease the counts, and return the numbers that are unused now."""
        np.subtract.at(self._uses, references, 1)
        self._uses[0] = 1
        candidates: Indices = np.unique(references)
        left = self._uses[candidates]
        if (left < 0).any():
            raise CorruptDataError(f"Reference {candidates[left.argmin()]} was released more often than it was used.")
        unused: Indices = candidates[left == 0]
        return unused

    def restart(self, size: int) -> None:
        """Start again with ``size`` numbers, all of them unused except 0."""
        self._uses = np.zeros(size, dtype=np.int64)
        self._uses[0] = 1

    def unused(self) -> Indices:
        """All unused numbers."""
        return np.flatnonzero(self._uses == 0)

    def check(self, references: Indices) -> None:
        """Raise an error unless the counts are those of ``references``."""
        expected = np.bincount(references, minlength=len(self._uses))
        expected[0] = self._uses[0]  # its users are not counted
        if len(expected) > len(self._uses):
            raise CorruptDataError(f"Reference {len(expected) - 1} is in use but does not exist.")
        (wrong,) = np.nonzero(expected != self._uses)
        if len(wrong):
            raise CorruptDataError(
                f"Reference {wrong[0]} has the count {self._uses[wrong[0]]}, but it is used {expected[wrong[0]]} times."
            )
