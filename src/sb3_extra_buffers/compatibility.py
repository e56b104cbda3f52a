"""Names and modules of version 0.5 that have moved. They work, with a ``DeprecationWarning`` that names the new one.

``NAMES`` lists the names that modules have lost, ``MODULES`` the modules that are gone. Each package calls
:func:`serve_old_names` when it has been imported.
"""

from __future__ import annotations

import functools
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
    """Returns the object, if ``new`` is not where it is."""


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
    warnings.warn(f"{module}.{name} is deprecated: use {moved.new}.", DeprecationWarning, stacklevel)
    if moved.make is not None:
        return moved.make()
    home, _, attribute = moved.new.rpartition(".")
    return getattr(import_module(home), attribute)


def serve_old_names(package: str) -> None:
    """Let ``package`` and its modules find what they had in version 0.5, where they do not have it any more."""
    for name in NAMES | MODULES:
        parent, _, child = name.rpartition(".")
        if package not in (name, parent):
            continue
        if name in MODULES:
            sys.modules[name] = ModuleType(name, "A module of version 0.5.")
            setattr(sys.modules[package], child, sys.modules[name])
        if name in sys.modules:  # packages inside this one call this function themselves
            vars(sys.modules[name]).setdefault("__getattr__", functools.partial(old_name, name))
