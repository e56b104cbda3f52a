"""The state of a buffer, a tree of values and arrays: validated access, and conversion of values to JSON.

To save a buffer, each of its parts returns a dict of numbers, strings, arrays and further dicts. To load it, each part
reads its values from a :class:`SavedState`, and says which type, shape and range a value must have. Every value is
checked, because files may be untrusted and compiled code does not check its indices.

Types that JSON does not have become a dict with one key that begins with ``$``: ``{"$dtype": "<f4"}``. If a key in a
user's dict begins with ``$`` or is not a string, the dict is written as pairs: ``{"$dict": [[key, value], ...]}``.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import CorruptDataError, SaveError

State = Mapping[str, Any]
"""Maps names to numbers, strings, ``None``, arrays and further states."""

Progress = Callable[[int], object]
"""A function that is called with the number of bytes that were just read or written."""

_LARGEST = 1 << 62
"""The largest integer in a state, if its reader sets no lower limit."""
_DTYPE = re.compile(r"[<>|=][biufcSU][0-9]{1,9}")
"""The dtypes that JSON can describe: numbers, booleans and strings, but no Python objects."""


class ArrayInfo(Protocol):
    """An array that has not been read yet."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class Source(Protocol):
    """A file or pickle that contains the arrays of a saved state."""

    @property
    def path(self) -> Any:
        """The name of the source in error messages."""

    @property
    def arrays(self) -> Mapping[str, ArrayInfo]: ...

    @property
    def is_mapped(self) -> bool:
        """Whether large arrays are memory-mapped from a file."""

    def read(
        self, name: str, progress: Progress | None = None, into: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[Any]:
        """Read an array. If ``into`` is given, which is zeroed memory, read the array into it."""

    def map(self, name: str, progress: Progress | None = None) -> Any:
        """Map an array. Returns memory with an attribute ``data``, or ``None`` if the array must be read instead."""


@dataclass(frozen=True)
class SavedState:
    """A saved state, or a part of it. All methods check what they return, except :meth:`value`."""

    source: Source
    plain: dict[str, Any]
    """Values that are not arrays."""
    prefix: str = ""
    """The beginning of the paths of this part's arrays, such as ``stores/image/``."""
    progress: Progress | None = None

    @property
    def is_mapped(self) -> bool:
        """Whether large arrays are memory-mapped from a file."""
        return self.source.is_mapped

    def part(self, name: str) -> SavedState:
        plain = self.plain.get(name)
        if not isinstance(plain, dict):
            raise self.error(name, "is missing")
        return SavedState(self.source, plain, f"{self.prefix}{escaped(name)}/", self.progress)

    def has(self, name: str) -> bool:
        return self.plain.get(name) is not None or self._stored(name) is not None

    def parts(self) -> list[SavedState]:
        """The parts of this part, in order."""
        return [self.part(name) for name, value in self.plain.items() if isinstance(value, dict)]

    def array_names(self) -> list[str]:
        """The names of the arrays in this part, without those in parts of it."""
        names = [path.removeprefix(self.prefix) for path in self.source.arrays if path.startswith(self.prefix)]
        return [name for name in names if "/" not in name]

    def value(self, name: str) -> Any:
        """A JSON value, which the caller must check."""
        return self.plain.get(name)

    def integer(self, name: str, low: int = 0, high: int = _LARGEST) -> int:
        value = self.plain.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, f"must be an integer from {low} to {high}, not {value!r}")
        return value

    def number(self, name: str) -> float:
        value: Any = self.plain.get(name)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(name, f"must be a finite number, not {value!r}")
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self.plain.get(name)
        if type(value) is not bool:
            raise self.error(name, f"must be true or false, not {value!r}")
        return value

    def array(self, name: str, dtype: npt.DTypeLike, shape: tuple[int | None, ...]) -> npt.NDArray[Any]:
        """An array of this dtype and shape, where ``None`` is any length."""
        path = self._checked_path(name, dtype, shape)
        mapped = self.source.map(path, self.progress)
        if mapped is None:
            return self.source.read(path, self.progress)
        stored = self.source.arrays[path]
        array: npt.NDArray[Any] = mapped.data[: stored.nbytes].view(stored.dtype).reshape(stored.shape)
        return array

    def dtype(self, name: str) -> np.dtype[Any] | None:
        """The dtype of an array, if there is one of this name."""
        stored = self._stored(name)
        return None if stored is None else stored.dtype

    def array_of_size(self, name: str, dtype: npt.DTypeLike, size: int) -> npt.NDArray[Any]:
        """An array of this dtype with ``size`` elements, in any shape."""
        stored = self._stored(name)
        if stored is None or math.prod(stored.shape) != size:
            raise self.error(name, f"must have {size} elements")
        return self.array(name, dtype, stored.shape)

    def json(self, name: str) -> Any:
        """A value that was saved as a :class:`Json` object."""
        value = self.plain.get(name)
        if isinstance(value, Json):
            return value.value
        return decode(json.loads(self.array(name, np.uint8, (None,)).tobytes()))

    def memory(self, name: str, allocate: Callable[[int], Any]) -> tuple[Any, int]:
        """An array of bytes in memory that can grow, and the number of bytes.

        :param allocate: For an array that is read, not mapped: returns at least the given number of zero bytes, as the
            attribute ``data`` of an object.
        """
        path = self._checked_path(name, np.uint8, (None,))
        size, memory = self.source.arrays[path].nbytes, self.source.map(path, self.progress)
        if memory is None:
            memory = allocate(size)
            self.source.read(path, self.progress, memory.data)
        return memory, size

    def _stored(self, name: str) -> ArrayInfo | None:
        return self.source.arrays.get(self.prefix + escaped(name))

    def _checked_path(self, name: str, dtype: npt.DTypeLike, shape: tuple[int | None, ...]) -> str:
        stored = self._stored(name)
        if stored is None:
            raise self.error(name, "is missing")
        fits = len(stored.shape) == len(shape) and all(
            wanted in (None, length) for wanted, length in zip(shape, stored.shape, strict=True)
        )
        if stored.dtype != np.dtype(dtype) or not fits:
            raise self.error(name, f"must be {np.dtype(dtype)} of {shape}, not {stored.dtype} of {stored.shape}")
        return self.prefix + escaped(name)

    def error(self, name: str, problem: str) -> CorruptDataError:
        return CorruptDataError(f"{self.source.path} is corrupt: {self.prefix}{name} {problem}.")


@dataclass
class Json:
    """Any value. A pickle holds it unchanged. A file holds it as JSON, and saving fails if that is not possible."""

    value: Any
    where: str
    """The name of the value in error messages."""


def escaped(name: str) -> str:
    """Escape slashes in a name, which becomes one part of an array's path, such as ``stores/image/ends/0``."""
    return name.replace("~", "~0").replace("/", "~1")


def encode(value: Any, where: str) -> Any:
    """Convert ``value`` to types that JSON has.

    :param where: The name of the value in error messages.
    """
    for cls in type(value).__mro__:
        if cls in ENCODERS:
            return ENCODERS[cls](value, where)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return _encode_array(np.asarray(value), isinstance(value, np.generic), where)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, list):
        return [encode(item, where) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, where) for item in value]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return {"$dtype": np.dtype(value).str}
    raise SaveError(
        f"{where} is of type {type(value).__name__}, which only pickle can save. This file format does not use pickle, "
        "because a pickle in an untrusted file can run any code. It saves numbers, strings, arrays, and lists and "
        "dicts of them. To save other values, use pickle: SB3's model.save_replay_buffer()."
    )


def decode(value: Any) -> Any:
    """Undo :func:`encode`. Raises :class:`CorruptDataError` if ``encode`` cannot have returned ``value``."""
    try:
        return _decode(value)
    except RecursionError:
        raise CorruptDataError("A value in the file is corrupt: it is nested too deeply.") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, AssertionError, MemoryError) as error:
        raise CorruptDataError(f"A value in the file is corrupt: {error}.") from error


def decode_dtype(text: Any) -> np.dtype[Any]:
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise ValueError(f"not a dtype: {text!r}")
    return np.dtype(text)


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: _decode(item) for key, item in value.items()}
    ((kind, content),) = value.items()
    return DECODERS[kind](_decode(content))


def _encode_array(array: np.ndarray[Any, Any], is_scalar: bool, where: str) -> Any:
    if not _DTYPE.fullmatch(array.dtype.str):
        raise SaveError(f"{where} has an array of dtype {array.dtype}, which only pickle can save.")
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"$scalar" if is_scalar else "$array": [array.dtype.str, list(array.shape), data]}


def _decode_array(content: Any) -> np.ndarray[Any, Any]:
    dtype, shape, data = content
    return np.frombuffer(base64.b64decode(data), dtype=decode_dtype(dtype)).reshape(shape).copy()


def _encode_mapping(value: Mapping[Any, Any], where: str) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    return {"$dict": [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}


ENCODERS: dict[type, Callable[[Any, str], Any]] = {}
"""For further classes, a function that :func:`encode` calls with the value and its name in error messages."""
DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": tuple,
    "$bytes": base64.b64decode,
    "$dict": dict,
    "$dtype": decode_dtype,
    "$array": _decode_array,
    "$scalar": lambda content: _decode_array(content)[()],
}
"""For each key ``$...``, the function that :func:`decode` calls with its content, which it has decoded before."""
