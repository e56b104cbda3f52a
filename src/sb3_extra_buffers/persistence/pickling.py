"""Pickles and copies of a buffer, which hold the same tree of values and arrays as a saved file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.persistence.description import split
from sb3_extra_buffers.state import Progress, SavedState, State
from sb3_extra_buffers.storage.memory import Unpickled


class Pickled:
    """Becomes a plain dict when it is pickled or copied: what ``describe`` returns, with ``lock`` held all the while.

    So no other thread can change an array while it is being written.
    """

    def __init__(self, lock: AbstractContextManager[Any], describe: Callable[[], State]) -> None:
        self._lock = lock
        self._describe = describe

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, self._items()

    def _items(self) -> Iterator[tuple[str, Any]]:
        # pickle and copy take one item after the other. The generator ends, or is closed, when they are through.
        with self._lock:
            yield from self._describe().items()


def unpickled(tree: State) -> SavedState:
    """What :class:`Pickled` became, for ``restore()``. Arrays are handed over, not copied."""
    plain, arrays = split(tree)
    return SavedState(_InMemory(arrays), plain)


class _InMemory:
    """Arrays that have been read already."""

    path = "The pickled buffer"
    is_mapped = False

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._memories = {name: value.memory for name, value in arrays.items() if isinstance(value, Unpickled)}
        self.arrays: dict[str, npt.NDArray[Any]] = {
            name: value.memory.data[: value.size] if isinstance(value, Unpickled) else value
            for name, value in arrays.items()
        }

    def read(
        self, name: str, progress: Progress | None = None, into: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[Any]:
        array = np.require(self.arrays[name], requirements=["C", "W"])
        if into is None:
            return array
        into[: array.nbytes] = array
        return into[: array.nbytes]

    def map(self, name: str) -> Any:
        return self._memories.get(name)
