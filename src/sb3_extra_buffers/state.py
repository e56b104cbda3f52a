"""The state of a buffer: how its parts write it, how they read it with checks, and how values become JSON.

To save a buffer, each part returns a dict of numbers, strings, arrays and further dicts: a tree. To load it, each part
reads its values from a :class:`SavedState`, and says which type, shape and range a value must have. A file may be
untrusted, and compiled code does not check its indices, so no value is used unchecked.

Types that JSON does not have become a dict with one key that begins with ``$``: ``{"$dtype": "<f4"}``. A user's dict
whose keys could be mistaken for that is written as pairs, ``{"$dict": [[key, value], ...]}``.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import CorruptDataError, SaveError

State = Mapping[str, Any]
"""Names to numbers, strings, ``None``, arrays, and further states."""

Progress = Callable[[int], object]
"""Called with the number of bytes that were read or written."""

_LARGEST = 1 << 62
_DTYPE = re.compile(r"[<>|=][biufcSU][0-9]{1,9}")


class ArrayInfo(Protocol):
    """An array that has not been read yet."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class Source(Protocol):
    """Where the arrays of a saved state are read from."""

    @property
    def path(self) -> Any:
        """Its name in error messages."""

    @property
    def arrays(self) -> Mapping[str, ArrayInfo]: ...

    @property
    def is_mapped(self) -> bool:
        """Whether large arrays are in a file, which the system loads on access."""

    def read(
        self, name: str, progress: Progress | None = None, into: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[Any]:
        """An array, in the zeroed memory ``into`` if that is given."""

    def map(self, name: str, progress: Progress | None = None) -> Any:
        """Memory, with an attribute ``data``, that holds an array or loads it on access; ``None``: :meth:`read` it."""


class SavedState:
    """A part of a saved state. Every value is checked when it is read."""

    def __init__(
        self,
        source: Source,
        plain: dict[str, Any],
        prefix: str = "",
        progress: Progress | None = None,
    ) -> None:
        self._source = source
        self._plain = plain
        self._prefix = prefix
        self._progress = progress

    @property
    def is_mapped(self) -> bool:
        """Whether large arrays are in a file, which the system loads on access."""
        return self._source.is_mapped

    def part(self, name: str) -> SavedState:
        plain = self._plain.get(name)
        if not isinstance(plain, dict):
            raise self.error(name, "is missing")
        return SavedState(self._source, plain, f"{self._prefix}{escaped(name)}/", self._progress)

    def has(self, name: str) -> bool:
        return self._plain.get(name) is not None or self._prefix + escaped(name) in self._source.arrays

    def parts(self) -> list[SavedState]:
        """All parts of this part, in order."""
        return [self.part(name) for name, value in self._plain.items() if isinstance(value, dict)]

    def array_names(self) -> list[str]:
        """The arrays of this part itself, without those of its parts."""
        names = [path.removeprefix(self._prefix) for path in self._source.arrays if path.startswith(self._prefix)]
        return [name for name in names if "/" not in name]

    def value(self, name: str) -> Any:
        """A JSON value. The caller must check it."""
        return self._plain.get(name)

    def integer(self, name: str, low: int = 0, high: int = _LARGEST) -> int:
        value = self._plain.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, f"must be an integer from {low} to {high}, not {value!r}")
        return value

    def number(self, name: str) -> float:
        value: Any = self._plain.get(name)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(name, f"must be a finite number, not {value!r}")
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self._plain.get(name)
        if type(value) is not bool:
            raise self.error(name, f"must be true or false, not {value!r}")
        return value

    def array(self, name: str, dtype: npt.DTypeLike, shape: tuple[int | None, ...]) -> npt.NDArray[Any]:
        """An array of this dtype and shape, where ``None`` is any length."""
        path = self._checked_path(name, dtype, shape)
        mapped = self._source.map(path, self._progress)
        if mapped is None:
            return self._source.read(path, self._progress)
        stored = self._source.arrays[path]
        array: npt.NDArray[Any] = mapped.data[: stored.nbytes].view(stored.dtype).reshape(stored.shape)
        return array

    def dtype(self, name: str) -> np.dtype[Any] | None:
        """The dtype of an array, if there is one of this name."""
        stored = self._source.arrays.get(self._prefix + escaped(name))
        return None if stored is None else stored.dtype

    def array_of_size(self, name: str, dtype: npt.DTypeLike, size: int) -> npt.NDArray[Any]:
        """An array of this dtype with ``size`` elements, in any shape."""
        stored = self._source.arrays.get(self._prefix + escaped(name))
        if stored is None or math.prod(stored.shape) != size:
            raise self.error(name, f"must have {size} elements")
        return self.array(name, dtype, stored.shape)

    def json(self, name: str) -> Any:
        """The value of a :class:`Json`."""
        value = self._plain.get(name)
        if isinstance(value, Json):
            return value.value
        return decode(json.loads(self.array(name, np.uint8, (None,)).tobytes()))

    def map_bytes(self, name: str) -> Any:
        """Memory that holds an array of bytes or loads it on access. If ``None``, call :meth:`read_bytes`."""
        return self._source.map(self._checked_path(name, np.uint8, (None,)), self._progress)

    def array_nbytes(self, name: str) -> int:
        return self._source.arrays[self._checked_path(name, np.uint8, (None,))].nbytes

    def read_bytes(self, name: str, into: npt.NDArray[np.uint8]) -> None:
        """Read an array of bytes into zeroed memory."""
        self._source.read(self._checked_path(name, np.uint8, (None,)), self._progress, into)

    def _checked_path(self, name: str, dtype: npt.DTypeLike, shape: tuple[int | None, ...]) -> str:
        path = self._prefix + escaped(name)
        stored = self._source.arrays.get(path)
        if stored is None:
            raise self.error(name, "is missing")
        fits = len(stored.shape) == len(shape) and all(
            wanted in (None, length) for wanted, length in zip(shape, stored.shape, strict=True)
        )
        if stored.dtype != np.dtype(dtype) or not fits:
            raise self.error(name, f"must be {np.dtype(dtype)} of {shape}, not {stored.dtype} of {stored.shape}")
        return path

    def error(self, name: str, problem: str) -> CorruptDataError:
        return CorruptDataError(f"{self._source.path} is corrupt: {self._prefix}{name} {problem}.")


class Json:
    """Any value. A pickle holds it unchanged. A file holds it as JSON, and saving fails if that is not possible."""

    def __init__(self, value: Any, where: str) -> None:
        self.value = value
        self.where = where
        """Its name in error messages."""


def escaped(name: str) -> str:
    """A name as one part of an array's path, such as ``stores/image/ends/0``."""
    return name.replace("~", "~0").replace("/", "~1")


def encode(value: Any, where: str) -> Any:
    """``value`` as something that JSON can hold.

    :param where: The name of the value in error messages.
    """
    for cls in type(value).__mro__:
        if cls in _ENCODERS:
            return _ENCODERS[cls](value, where)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return _encode_array(np.asarray(value), isinstance(value, np.generic), where)
    if isinstance(value, int):
        return value
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
        f"{where} is of type {type(value).__name__}, which only pickle can save. This file format does not use "
        "pickle, because a pickle in an untrusted file can run any code. It saves numbers, strings, arrays, and lists "
        "and dicts of them. SB3's model.save_replay_buffer() uses pickle and saves anything."
    )


def decode(value: Any) -> Any:
    """The inverse of :func:`encode`. A value that it cannot have written is a :class:`CorruptDataError`."""
    try:
        return _decode(value)
    except RecursionError:
        raise CorruptDataError("A value in the file is corrupt: it is nested too deep.") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, AssertionError, MemoryError) as error:
        raise CorruptDataError(f"A value in the file is corrupt: {error}.") from error


def register_encoder(cls: type, encoder: Callable[[Any, str], Any]) -> None:
    """Let :func:`encode` write values of ``cls`` by ``encoder(value, where)``."""
    _ENCODERS[cls] = encoder


def register_decoder(kind: str, decoder: Callable[[Any], Any]) -> None:
    """Let :func:`decode` read ``{kind: content}`` by ``decoder(content)``, where ``content`` is decoded already."""
    _DECODERS[kind] = decoder


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
    return _DECODERS[kind](_decode(content))


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


_ENCODERS: dict[type, Callable[[Any, str], Any]] = {}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": tuple,
    "$bytes": base64.b64decode,
    "$dict": dict,
    "$dtype": decode_dtype,
    "$array": _decode_array,
    "$scalar": lambda content: _decode_array(content)[()],
}
