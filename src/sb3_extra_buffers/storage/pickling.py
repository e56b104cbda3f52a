"""Pickles and copies of stores. They hold the same tree of values and arrays as a saved file.

The last part is for pickles that version 1.0.0.dev0 wrote. They hold the attributes of objects, and name their classes
by the modules of that version: ``storage.{arena, config, frame_store, matching, memory, observation_array,
observation_store, outputs, stacking}`` and ``codecs.{base, method, references}`` beside the codecs' own. Therefore
those classes keep their names and modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.state import Progress, SavedState, State, escaped
from sb3_extra_buffers.storage.memory import PartOfBytes, Unpickled
from sb3_extra_buffers.storage.record_index import RecordIndex


class Pickled:
    """Pickles and copies as the plain dict that ``tree()`` returns. Meanwhile, ``lock`` is held.

    So no other thread can change an array while it is being written.
    """

    def __init__(self, lock: AbstractContextManager[Any], tree: Callable[[], State]) -> None:
        self._lock = lock
        self._tree = tree

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, self._items()

    def _items(self) -> Iterator[tuple[str, Any]]:
        # pickle and copy take one item after the other. When they are done, or fail, the generator releases the lock.
        with self._lock:
            yield from self._tree().items()


def unpickled(tree: State) -> SavedState:
    """A tree that was pickled by :class:`Pickled`, for ``restore()``. Arrays are handed over, not copied."""
    plain, arrays = split(tree)
    return SavedState(_ArraysInMemory(arrays), plain)


def split(state: State, prefix: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the values of a tree from its arrays. An array is named by its path, such as ``stores/image/ends/0``."""
    plain: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, np.ndarray | PartOfBytes | Unpickled):
            arrays[prefix + escaped(key)] = value
        elif isinstance(value, Mapping):
            plain[key], below = split(value, f"{prefix}{escaped(key)}/")
            arrays.update(below)
        else:
            plain[key] = value
    return plain, arrays


class _ArraysInMemory:
    """The source of a state that was pickled or copied."""

    path = "The pickled buffer"
    is_mapped = False

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._memories = {name: value.memory for name, value in arrays.items() if isinstance(value, Unpickled)}
        self.arrays: dict[str, npt.NDArray[Any]] = {name: _array(value) for name, value in arrays.items()}

    def read(
        self, name: str, progress: Progress | None = None, into: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[Any]:
        array = np.require(self.arrays[name], requirements=["C", "W"])
        if into is None:
            return array
        into[: array.nbytes] = array
        return into[: array.nbytes]

    def map(self, name: str, progress: Progress | None = None) -> Any:
        return self._memories.get(name)


def _array(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, Unpickled):
        return value.memory.data[: value.size]
    array: npt.NDArray[Any] = value.data if isinstance(value, PartOfBytes) else value
    return array


def arguments_of(store: Any) -> dict[str, Any]:
    """The constructor arguments of an empty copy of an observation store, in memory."""
    return {
        "n_slots": store.n_slots,
        "n_envs": store.n_envs,
        "shape": store.shape,
        "dtype": store.dtype,
        "config": store.config,
        "n_columns": store.n_columns,
        "as_float": store.output_dtype == np.float32,
        "divisor": store.divisor,
        "verify": store.digests is not None,
    }


def upgraded_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an observation store from a pickle of 1.0.0.dev0, so that ``state()`` can be called."""
    renamed = {"_recipe": "recipe", "_slots_used": "slots_used"}
    upgraded: dict[str, Any] = {"digests": None, "choice": "", "_earlier": []}
    upgraded |= {renamed.get(name, name): value for name, value in attributes.items()}
    upgraded["n_columns"] = len(upgraded["ends"])
    for frames in [upgraded["frames"], *(earlier.frames for earlier in upgraded["_earlier"])]:
        vars(frames).setdefault("base", np.zeros_like(frames.heads))
        index = frames.index = RecordIndex(*frames.starts.shape)
        index.starts, index.lengths, index.references = frames.starts, frames.lengths, frames.references
        index.has_references = frames._has_references
        frames.arena._memory = frames.arena._memory.memory
    return upgraded
