"""The contents of a saved buffer: its class, constructor arguments and state, as JSON and arrays.

Pickles contain the same state; see :mod:`sb3_extra_buffers.storage.pickling`.
"""

from __future__ import annotations

import json
import math
import numbers
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from sb3_extra_buffers import __version__
from sb3_extra_buffers.errors import CorruptDataError, ExtraBuffersError, FileFormatError
from sb3_extra_buffers.persistence import spaces as spaces  # registers how spaces are written
from sb3_extra_buffers.persistence.container import Container, Value
from sb3_extra_buffers.state import Json, Progress, State, decode, encode
from sb3_extra_buffers.storage.pickling import split

STATE = "state"
"""The name of the container in the folder of a buffer on disk."""
_MIN_FOR_BAR = {"B": 64 << 20, "steps": 10_000}
"""The amount of work, in bytes or steps, from which progress bars are shown by default."""
_FORBIDDEN_IN_FILES = {"storage", "path", "device"}
"""Arguments that only the caller of ``load()`` may choose. Otherwise, a file could choose where a buffer writes."""

REMOVED_ARGUMENTS = {"prefetch"}
"""Arguments in files and pickles of earlier versions that constructors no longer have."""
_NUMBERS = ("buffer_size", "n_envs", "gamma", "gae_lambda", "n_steps", "alpha", "epsilon", "n_sampled_goal")
"""Arguments that must be finite numbers. Constructors do not check their types."""
_MOST = {"n_steps": 1 << 20, "n_envs": 1 << 20}
"""The largest values of arguments that memory grows with: that of a batch, and that of an empty buffer."""


def state_file(path: Path) -> Path:
    """The container of a buffer: ``path`` itself, or a file in the folder of a buffer on disk."""
    if not path.is_dir():
        return path
    if not (path / STATE).exists():
        raise FileFormatError(f"{path} is not the folder of a buffer on disk: it has no file {STATE!r}.")
    return path / STATE


@contextmanager
def bar(what: str, size: int, show: bool | None, unit: str = "B") -> Iterator[Progress]:
    """A progress bar. If ``show`` is ``None``, it is shown only for long work and in a terminal."""
    if show is None:
        show = size >= _MIN_FOR_BAR[unit] and sys.stderr.isatty()
    if not show:
        # Not a disabled bar: all forked processes share tqdm's lock, and one that is killed may never release it.
        yield lambda count: None
        return
    with tqdm(total=size, desc=what, unit=unit, unit_scale=True, leave=False) as shown:
        yield shown.update


def describe(buffer: Any) -> tuple[dict[str, Any], dict[str, Value]]:
    """Convert a buffer (see ``compressed/saving.py``) to JSON and arrays."""
    plain, arrays = flat(buffer._state())
    meta = {
        "class": buffer._library_class().__name__,
        "library": __version__,
        "arguments": encode(buffer._arguments(), "The buffer"),
        "state": plain,
    }
    return meta, arrays


def flat(state: State) -> tuple[dict[str, Any], dict[str, Value]]:
    """Split a state into JSON and arrays, which are named by their paths. ``Json`` values become arrays of bytes."""
    return split({name: _as_bytes(part) if isinstance(part, Json) else part for name, part in state.items()})


def read_arguments(file: Container) -> dict[str, Any]:
    """Read and check the constructor arguments of the buffer in a file."""
    arguments = decode(file.meta.get("arguments"))
    if not isinstance(arguments, dict):
        raise CorruptDataError(f"{file.path} is corrupt: it has no arguments for a buffer.")
    if forbidden := sorted(_FORBIDDEN_IN_FILES & arguments.keys()):
        raise CorruptDataError(f"{file.path} is corrupt: no saved buffer has the arguments {forbidden}.")
    for name in _NUMBERS:
        value = arguments.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise CorruptDataError(f"{file.path} is corrupt: {name} is {value!r}, not a number.")
    for name, most in _MOST.items():
        if arguments.get(name, 1) > most:
            raise CorruptDataError(f"{file.path} is corrupt: {name} is {arguments[name]}, more than {most}.")
    return {name: value for name, value in arguments.items() if name not in REMOVED_ARGUMENTS}


@contextmanager
def as_corrupt(path: Path | str) -> Iterator[None]:
    """Turn errors that the contents of a file cause into :class:`CorruptDataError`, except for this library's own."""
    try:
        yield
    except (ExtraBuffersError, OSError):
        raise
    except Exception as error:
        raise CorruptDataError(f"{path} is corrupt: {error}") from error


def _as_bytes(value: Json) -> npt.NDArray[np.uint8]:
    return np.frombuffer(json.dumps(encode(value.value, value.where)).encode(), dtype=np.uint8)
