"""A buffer as a tree of values and arrays: its class, its constructor arguments and its state.

Files hold the tree as JSON and arrays. Pickles, see :mod:`sb3_extra_buffers.storage.pickling`, hold the tree itself.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers import __version__
from sb3_extra_buffers.errors import CorruptDataError, ExtraBuffersError
from sb3_extra_buffers.persistence import spaces as spaces  # registers how spaces are written
from sb3_extra_buffers.persistence.container import Container, Value
from sb3_extra_buffers.state import Json, SavedState, State, decode, encode
from sb3_extra_buffers.storage.pickling import split

_FORBIDDEN_IN_FILES = {"storage", "path", "device"}
"""Arguments that only the caller of ``load()`` may choose: a file could make a buffer write anywhere on the disk."""

_NUMBERS = ("buffer_size", "n_envs", "gamma", "gae_lambda", "n_steps", "alpha", "epsilon", "n_sampled_goal")
"""Arguments that constructors do not check."""
_MOST_STEPS = 1 << 20
"""Of an n-step return: a batch takes memory for all of them."""


class SavedBuffer(Protocol):
    """A buffer, as far as it is needed to save it. See ``compressed/saving.py``."""

    pos: int
    full: bool

    @property
    def _stores(self) -> Mapping[str, Any]: ...
    @property
    def _folder(self) -> Any: ...
    @classmethod
    def _library_class(cls) -> type: ...
    def _arguments(self) -> dict[str, Any]: ...
    def _state(self) -> State: ...
    def _restore(self, state: SavedState) -> None: ...
    def _check_folder(self) -> None: ...
    def close(self) -> None: ...


def describe(buffer: SavedBuffer) -> tuple[dict[str, Any], dict[str, Value]]:
    """All of a buffer, as JSON and arrays."""
    plain, arrays = split(
        {name: _as_bytes(part) if isinstance(part, Json) else part for name, part in buffer._state().items()}
    )
    meta = {
        "class": buffer._library_class().__name__,
        "library": __version__,
        "arguments": encode(buffer._arguments(), "The buffer"),
        "state": plain,
    }
    return meta, arrays


def read_arguments(file: Container) -> dict[str, Any]:
    """The constructor arguments of the buffer in a file."""
    arguments = decode(file.meta.get("arguments"))
    if not isinstance(arguments, dict):
        raise CorruptDataError(f"{file.path} makes no sense: it has no arguments for a buffer.")
    if forbidden := sorted(_FORBIDDEN_IN_FILES & arguments.keys()):
        raise CorruptDataError(f"{file.path} makes no sense: no saved buffer has the arguments {forbidden}.")
    for name in _NUMBERS:
        value = arguments.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise CorruptDataError(f"{file.path} makes no sense: {name} is {value!r}, not a number.")
    if arguments.get("n_steps", 1) > _MOST_STEPS:
        raise CorruptDataError(f"{file.path} makes no sense: returns of {arguments['n_steps']} steps.")
    return arguments


@contextmanager
def as_corrupt(path: Path) -> Iterator[None]:
    """Turn errors that are caused by the contents of a file into a :class:`CorruptDataError`."""
    try:
        yield
    except (ExtraBuffersError, OSError):
        raise
    except Exception as error:
        raise CorruptDataError(f"{path} makes no sense: {error}") from error


def _as_bytes(value: Json) -> npt.NDArray[np.uint8]:
    return np.frombuffer(json.dumps(encode(value.value, value.where)).encode(), dtype=np.uint8)
