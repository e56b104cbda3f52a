"""What a file says a buffer is: its class, the arguments that it was made with, and its state."""

from __future__ import annotations

import importlib
import json
import math
import numbers
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sb3_extra_buffers import __version__
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError, ExtraBuffersError
from sb3_extra_buffers.persistence.container import Container, Value
from sb3_extra_buffers.persistence.plain import decode, encode
from sb3_extra_buffers.state import Json, State, escaped
from sb3_extra_buffers.storage.memory import PartOfBytes, Unpickled

if TYPE_CHECKING:
    from sb3_extra_buffers.compressed.base import BaseCompressedBuffer

Buffer = TypeVar("Buffer", bound="BaseCompressedBuffer")

CLASSES = {
    "CompressedDictNStepReplayBuffer": "compressed.nstep_buffer",
    "CompressedDictPrioritizedReplayBuffer": "compressed.prioritized_buffer",
    "CompressedDictReplayBuffer": "compressed.replay_buffer",
    "CompressedDictRolloutBuffer": "compressed.rollout_buffer",
    "CompressedHerReplayBuffer": "compressed.her_buffer",
    "CompressedMaskableDictRolloutBuffer": "compressed.maskable_buffer",
    "CompressedMaskableRolloutBuffer": "compressed.maskable_buffer",
    "CompressedNStepReplayBuffer": "compressed.nstep_buffer",
    "CompressedPrioritizedReplayBuffer": "compressed.prioritized_buffer",
    "CompressedRecurrentDictRolloutBuffer": "compressed.recurrent_buffer",
    "CompressedRecurrentRolloutBuffer": "compressed.recurrent_buffer",
    "CompressedReplayBuffer": "compressed.replay_buffer",
    "CompressedRolloutBuffer": "compressed.rollout_buffer",
    "GpuDictReplayBuffer": "gpu_buffers.replay_buffer",
    "GpuDictRolloutBuffer": "gpu_buffers.rollout_buffer",
    "GpuReplayBuffer": "gpu_buffers.replay_buffer",
    "GpuRolloutBuffer": "gpu_buffers.rollout_buffer",
}
"""The classes that a file may name, and the modules that they are in. A file names nothing else."""

_OF_WHOEVER_LOADS = {"storage", "path", "device"}
"""Arguments that a file has no say in: a stranger's could make a buffer write to any place on the disk."""

_NUMBERS = ("buffer_size", "n_envs", "gamma", "gae_lambda", "n_steps", "alpha", "epsilon", "n_sampled_goal")
"""Arguments that constructors take on trust."""
_MOST_STEPS = 1 << 20
"""Of an n-step return: a batch takes memory for all of them."""

_PACKAGE = __name__.split(".", maxsplit=1)[0]


def describe(buffer: BaseCompressedBuffer) -> tuple[dict[str, Any], dict[str, Value]]:
    """All of a buffer, as JSON and arrays."""
    plain, arrays = split(_with_json(buffer._state()))
    meta = {
        "class": _library_class(type(buffer)).__name__,
        "library": __version__,
        "arguments": encode(buffer._arguments(), "The buffer"),
        "state": plain,
    }
    return meta, arrays


def arguments_of(file: Container) -> dict[str, Any]:
    """The arguments that the buffer in a file was made with."""
    arguments = decode(file.meta.get("arguments"))
    if not isinstance(arguments, dict):
        raise CorruptDataError(f"{file.path} makes no sense: it has no arguments for a buffer.")
    if elsewhere := sorted(_OF_WHOEVER_LOADS & arguments.keys()):
        raise CorruptDataError(f"{file.path} makes no sense: no saved buffer has the arguments {elsewhere}.")
    for name in _NUMBERS:
        value = arguments.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise CorruptDataError(f"{file.path} makes no sense: {name} is {value!r}, not a number.")
    if arguments.get("n_steps", 1) > _MOST_STEPS:
        raise CorruptDataError(f"{file.path} makes no sense: returns of {arguments['n_steps']} steps.")
    return arguments


def class_to_load(wanted: type[Buffer], file: Container) -> type[Buffer]:
    """The class of the buffer in a file, if it is ``wanted`` or derived from it, or a user's class derived from it."""
    name = file.meta.get("class")
    if not isinstance(name, str) or name not in CLASSES:
        raise CorruptDataError(f"{file.path} makes no sense: it is of class {name!r}.")
    saved = getattr(importlib.import_module(f"{_PACKAGE}.{CLASSES[name]}"), name)
    if issubclass(saved, wanted):
        return saved  # type: ignore[no-any-return]
    if wanted.__name__ not in CLASSES and issubclass(wanted, saved):
        return wanted
    raise ConfigurationError(f"{file.path} holds a {name}, not a {wanted.__name__}: use {name}.load().")


@contextmanager
def as_corrupt(path: Path) -> Iterator[None]:
    """Nothing that a file says may surprise whoever loads it with errors of another kind."""
    try:
        yield
    except (ExtraBuffersError, OSError):
        raise
    except Exception as error:
        raise CorruptDataError(f"{path} makes no sense: {error}") from error


def _library_class(cls: type[Any]) -> type[Any]:
    """The class of this library that a user's class is derived from."""
    return next(base for base in cls.__mro__ if base.__name__ in CLASSES and base.__module__.startswith(_PACKAGE))


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


def _with_json(state: State) -> State:
    """The state with all values of type :class:`Json` as arrays of bytes."""
    return {
        name: np.frombuffer(json.dumps(encode(value.value, value.where)).encode(), dtype=np.uint8)
        if isinstance(value, Json)
        else value
        for name, value in state.items()
    }
