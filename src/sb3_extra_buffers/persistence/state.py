"""What a part of a buffer is, as values that have names.

Saving, a part describes itself by a dict of numbers, strings, arrays and further such dicts. Loading, it gets them back
as a :class:`SavedState`, by asking for each with the type, shape and range that it needs: a file may come from a
stranger, and compiled code trusts its indices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.persistence.container import Container, Progress, Value
from sb3_extra_buffers.storage.memory import AnonymousMemory, Memory, PartOfBytes

State = Mapping[str, Any]
"""Names to numbers, strings, ``None``, arrays, and further states."""

_LARGEST = 1 << 62


def split(state: State, prefix: str = "") -> tuple[dict[str, Any], dict[str, Value]]:
    """Apart: what goes into JSON, and the arrays, whose names are the way to them (``stores/image/ends/0``)."""
    plain: dict[str, Any] = {}
    arrays: dict[str, Value] = {}
    for key, value in state.items():
        if isinstance(value, np.ndarray | PartOfBytes):
            arrays[prefix + _escaped(key)] = value
        elif isinstance(value, Mapping):
            plain[key], below = split(value, f"{prefix}{_escaped(key)}/")
            arrays.update(below)
        else:
            plain[key] = value
    return plain, arrays


class SavedState:
    """A part of what a file holds. Everything is checked when it is asked for."""

    def __init__(
        self,
        file: Container,
        plain: dict[str, Any],
        prefix: str = "",
        mmap: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self._file = file
        self._plain = plain
        self._prefix = prefix
        self.is_mapped = mmap
        """Whether large arrays are to stay in the file until somebody looks at them."""
        self._progress = progress

    def part(self, name: str) -> SavedState:
        plain = self._plain.get(name)
        if not isinstance(plain, dict):
            raise self.error(name, "is missing")
        return SavedState(self._file, plain, f"{self._prefix}{_escaped(name)}/", self.is_mapped, self._progress)

    def has(self, name: str) -> bool:
        return self._plain.get(name) is not None or self._prefix + _escaped(name) in self._file.arrays

    def parts(self) -> list[SavedState]:
        """All parts of this part, in order."""
        return [self.part(name) for name, value in self._plain.items() if isinstance(value, dict)]

    def array_names(self) -> list[str]:
        """The arrays of this part, without those of parts of it."""
        names = [path.removeprefix(self._prefix) for path in self._file.arrays if path.startswith(self._prefix)]
        return [name for name in names if "/" not in name]

    def value(self, name: str) -> Any:
        """What JSON holds, as it is."""
        return self._plain.get(name)

    def integer(self, name: str, low: int = 0, high: int = _LARGEST) -> int:
        value = self._plain.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, f"must be an integer from {low} to {high}, not {value!r}")
        return value

    def number(self, name: str) -> float:
        value: Any = self._plain.get(name)
        if type(value) not in (int, float):
            raise self.error(name, f"must be a number, not {value!r}")
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self._plain.get(name)
        if type(value) is not bool:
            raise self.error(name, f"must be true or false, not {value!r}")
        return value

    def array(self, name: str, dtype: npt.DTypeLike, shape: tuple[int | None, ...]) -> npt.NDArray[Any]:
        """An array of this dtype and shape, where ``None`` is any length."""
        path = self._checked_path(name, dtype, shape)
        mapped = self._file.map(path) if self.is_mapped else None
        if mapped is None:
            return self._file.read(path, self._progress)
        stored = self._file.arrays[path]
        return mapped.data[: stored.nbytes].view(stored.dtype).reshape(stored.shape)

    def array_of_size(self, name: str, dtype: npt.DTypeLike, size: int) -> npt.NDArray[Any]:
        """An array of this dtype with so many elements, in any shape."""
        stored = self._file.arrays.get(self._prefix + _escaped(name))
        if stored is None or math.prod(stored.shape) != size:
            raise self.error(name, f"must have {size} elements")
        return self.array(name, dtype, stored.shape)

    def memory(self, name: str, at_least: int) -> tuple[Memory, int]:
        """Bytes that may grow, and how many of them the file holds."""
        path = self._checked_path(name, np.uint8, (None,))
        size = self._file.arrays[path].nbytes
        mapped = self._file.map(path) if self.is_mapped else None
        if mapped is not None:
            return mapped, size
        memory = AnonymousMemory(max(size, at_least))
        self._file.read(path, self._progress, memory.data)
        return memory, size

    def _checked_path(self, name: str, dtype: npt.DTypeLike, shape: tuple[int | None, ...]) -> str:
        path = self._prefix + _escaped(name)
        stored = self._file.arrays.get(path)
        if stored is None:
            raise self.error(name, "is missing")
        fits = len(stored.shape) == len(shape) and all(
            wanted in (None, length) for wanted, length in zip(shape, stored.shape, strict=True)
        )
        if stored.dtype != np.dtype(dtype) or not fits:
            raise self.error(name, f"must be {np.dtype(dtype)} of {shape}, not {stored.dtype} of {stored.shape}")
        return path

    def error(self, name: str, problem: str) -> CorruptDataError:
        return CorruptDataError(f"{self._file.path} makes no sense: {self._prefix}{name} {problem}.")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
