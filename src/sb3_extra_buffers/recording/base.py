"""What all record buffers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Record(NamedTuple):
    """One step: what was seen, the reward and the action that followed, and features where they are recorded."""

    frame: npt.NDArray[Any]
    reward: np.generic
    action: Any
    features: Any


class Records(NamedTuple):
    """Many steps, oldest first. ``features`` is ``None`` where none are recorded."""

    frames: npt.NDArray[Any]
    rewards: npt.NDArray[Any]
    actions: npt.NDArray[Any]
    features: npt.NDArray[Any] | None


class BaseRecordBuffer(ABC):
    """Something that steps can be recorded into. As a sequence, it is the steps that it holds, oldest first."""

    frames: Any
    """By slot, as are the other three: step ``n`` is in slot ``n % max_size``. Slots not written yet are zero."""
    rewards: npt.NDArray[Any]
    actions: npt.NDArray[Any]
    features: npt.NDArray[Any] | None

    @abstractmethod
    def add(self, frame: Any, reward: Any, action: Any, features: Any = None) -> None:
        """Record a step. Once the buffer is full, the oldest step makes room."""

    @abstractmethod
    def __len__(self) -> int:
        """Steps held now."""

    @abstractmethod
    def __getitem__(self, index: int) -> Record:
        """The step at ``index``, counted from the oldest; ``-1`` is the newest."""

    @abstractmethod
    def __iter__(self) -> Iterator[Record]:
        """All steps, oldest first."""
