"""Keep programs written for version 0.5 working. New programs do not need this package.

* Names and modules that have moved. They work, with a ``DeprecationWarning`` that says what to use instead. ``NAMES``
  lists names that modules have lost, ``MODULES`` modules that are gone. Each package calls :func:`serve_old_names` at
  the end of its import.
* :class:`OldAttributes`, attributes that buffers had.
* :mod:`.device`: memory, methods and estimates of ``gpu_buffers``.

Importing this module imports neither torch nor SB3, because the package itself imports it.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any, NamedTuple

_TOP = "sb3_extra_buffers"
_COMPRESSED, _GPU, _RECORDING = f"{_TOP}.compressed", f"{_TOP}.gpu_buffers", f"{_TOP}.recording"


class Moved(NamedTuple):
    new: str
    """What to write instead."""
    make: Callable[[], Any] | None = None
    """Returns the object, if ``new`` is not its import path."""


def _all_in(home: str, *names: str) -> dict[str, Moved]:
    return {name: Moved(f"{home}.{name}") for name in names}


def _number_type() -> Any:
    numpy = import_module("numpy")
    return int | float | numpy.integer | numpy.floating


def _replay_like() -> Any:
    sb3_buffers, recording = import_module("stable_baselines3.common.buffers"), import_module(_RECORDING)
    return sb3_buffers.BaseBuffer | recording.BaseRecordBuffer


def _sb3_version() -> tuple[int, ...]:
    return tuple(int(part) for part in version("stable_baselines3").split(".")[:3])


_TYPES = {
    "NumberType": Moved("int | float | numpy.integer | numpy.floating", _number_type),
    "ReplayLike": Moved("BaseBuffer | BaseRecordBuffer", _replay_like),
}

NAMES = {
    _TOP: {**_TYPES, "sb3_version": Moved("stable_baselines3.__version__", lambda: _sb3_version)},
    f"{_COMPRESSED}.base": _all_in(_COMPRESSED, "find_buffer_dtypes", "find_smallest_dtype", "init_jit"),
    _GPU: {
        **_all_in(f"{_GPU}.raw_buffer", "RawBuffer", "SharedRawHeap"),
        **_all_in(f"{_GPU}.metadata", "SlotMetadata"),
    },
    f"{_GPU}.base": _all_in(_GPU, "find_gpu_buffer_dtypes"),
    f"{_TOP}.training_utils.buffer_warmup": _all_in(f"{_TOP}.training_utils.eval_model", "eval_model"),
}
MODULES = {
    f"{_TOP}.types": _TYPES,
    f"{_COMPRESSED}.compressed_replay": _all_in(_COMPRESSED, "CompressedReplayBuffer", "CompressedDictReplayBuffer"),
    f"{_COMPRESSED}.compressed_rollout": _all_in(_COMPRESSED, "CompressedRolloutBuffer", "CompressedDictRolloutBuffer"),
    f"{_COMPRESSED}.utils": _all_in(_COMPRESSED, "find_smallest_dtype"),
    f"{_GPU}.gpu_replay": _all_in(_GPU, "GpuReplayBuffer", "GpuDictReplayBuffer"),
    f"{_GPU}.gpu_rollout": _all_in(_GPU, "GpuRolloutBuffer", "GpuDictRolloutBuffer"),
    f"{_GPU}.compression_methods": _all_in(_GPU, "COMPRESSION_METHOD_MAP", "has_zstd"),
    f"{_RECORDING}.base": _all_in(_RECORDING, "BaseRecordBuffer"),
    f"{_RECORDING}.dummy_record_buffers": _all_in(_RECORDING, "DummyRecordBuffer", "FramelessRecordBuffer"),
}


def old_name(module: str, name: str, stacklevel: int = 2) -> Any:
    """The object that ``module`` had under ``name`` in version 0.5."""
    moved = (NAMES | MODULES).get(module, {}).get(name)
    if moved is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    _warn(f"{module}.{name}", moved.new, stacklevel + 1)
    if moved.make is not None:
        return moved.make()
    home, _, attribute = moved.new.rpartition(".")
    return getattr(import_module(home), attribute)


def serve_old_names(package: str) -> None:
    """Add the names and modules that ``package`` had in version 0.5 and has no more. Each is imported on first use."""
    for name in NAMES | MODULES:
        parent, _, child = name.rpartition(".")
        if package not in (name, parent):
            continue
        if name in MODULES:
            sys.modules[name] = ModuleType(name, "A module of version 0.5.")
            setattr(sys.modules[package], child, sys.modules[name])
        if name in sys.modules:  # a subpackage that is not imported yet calls this function itself
            vars(sys.modules[name]).setdefault("__getattr__", functools.partial(old_name, name))


class OldAttributes:
    """Attributes that buffers of version 0.5 had."""

    observation_space: Any
    observations: Any
    next_observations: Any

    @property
    def dtypes(self) -> dict[str, Any]:
        """``elem_type`` and ``runs_type``; with a Dict space, for each key."""
        from sb3_extra_buffers.compressed import find_buffer_dtypes

        return self._for_space("dtypes", "find_buffer_dtypes()", lambda shape, dtype: find_buffer_dtypes(shape, dtype))

    @property
    def flatten_config(self) -> dict[str, Any]:
        """The number of elements of an observation, and their dtype."""
        return self._for_space(
            "flatten_config",
            "buffer.observation_space",
            lambda shape, dtype: {"shape": math.prod(shape), "dtype": dtype},
        )

    def reconstruct_obs(self, idx: int, env_idx: int | None = None) -> Any:
        """Decode one observation. Leave out ``env_idx`` if SB3 has flattened the rollout."""
        _warn("reconstruct_obs()", "buffer.observations[idx, env_idx]")
        return _item(self.observations, idx if env_idx is None else (idx, env_idx))

    def reconstruct_nextobs(self, idx: int, env_idx: int) -> Any:
        _warn("reconstruct_nextobs()", "buffer.next_observations[idx, env_idx]")
        return _item(self.next_observations, (idx, env_idx))

    def _for_space(self, name: str, new: str, function: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        from gymnasium import spaces
        from stable_baselines3.common.preprocessing import get_obs_shape

        _warn(name, new, stacklevel=4)
        space = self.observation_space
        if isinstance(space, spaces.Dict):
            return {key: function(get_obs_shape(part), part.dtype) for key, part in space.spaces.items()}
        return function(get_obs_shape(space), space.dtype)


def _item(observations: Any, key: Any) -> Any:
    if isinstance(observations, dict):
        return {name: array[key] for name, array in observations.items()}
    return observations[key]


def _warn(old: str, new: str, stacklevel: int = 3) -> None:
    warnings.warn(f"{old} is deprecated: use {new}.", DeprecationWarning, stacklevel)
