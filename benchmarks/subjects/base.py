"""The interface to the buffers of all libraries. An adapter adds no work to what its library does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy.typing as npt
from gymnasium import spaces

from benchmarks.recordings import Transition

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Task:
    """What a buffer has to store."""

    capacity: int
    """Transitions, of all environments together."""
    n_envs: int
    stack: int
    """Frames in an observation."""
    observation_space: Any
    """A Box, or a Dict of them."""
    action_space: spaces.Discrete | spaces.Box


class Subject(ABC):
    """A replay buffer of one library."""

    distribution: ClassVar[str]
    """The name by which pip installs the library."""

    def __init__(self, method: str, task: Task) -> None:
        self.method = method
        self.task = task

    @classmethod
    def version(cls) -> str:
        return version(cls.distribution)

    @abstractmethod
    def add(self, step: Transition) -> None:
        """Store one transition of every environment."""

    @abstractmethod
    def sample(self, batch_size: int) -> Any:
        """Draw transitions, complete and ready for use."""

    @abstractmethod
    def observations(self, batch: Any) -> tuple[Any, Any]:
        """The observations and next observations of what :meth:`sample` returned, as arrays or dicts of arrays."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write everything to ``path``, a file or a folder that does not exist yet."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Replace the content by what :meth:`save` wrote."""

    def payload_per_frame(self) -> float | None:
        """Compressed bytes per stored frame, as the library reports them; ``None`` if it does not.

        Only valid before anything is overwritten.
        """
        return None

    def usage(self) -> dict[str, Any] | None:
        """Method, reason for it, and bytes per transition, as the library reports them; ``None`` if it does not."""
        return None
