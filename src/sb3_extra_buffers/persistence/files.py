"""Saving buffers to files, and loading them."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch as th
from stable_baselines3.common.utils import check_for_correct_spaces
from stable_baselines3.common.vec_env import VecEnv
from tqdm import tqdm

from sb3_extra_buffers import __version__
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError, ExtraBuffersError
from sb3_extra_buffers.persistence import container
from sb3_extra_buffers.persistence.container import Container, Progress
from sb3_extra_buffers.persistence.plain import decode, encode
from sb3_extra_buffers.persistence.state import SavedState, split

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

_WORTH_A_BAR = 64 << 20


def save(buffer: BaseCompressedBuffer, path: Path, progress: bool | None = None) -> int:
    """Write ``buffer`` to ``path`` and return how many bytes that took."""
    plain, arrays = split(buffer._state())
    meta = {
        "class": _library_class(type(buffer)).__name__,
        "library": __version__,
        "arguments": encode(buffer._arguments(), "The buffer"),
        "state": plain,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    size = sum(value.data.nbytes for value in arrays.values())
    with _bar(f"saving {path.name}", size, progress) as update:
        return container.write(path, meta, arrays, update)


def load(
    buffer_class: type[Buffer],
    path: Path,
    device: th.device | str = "auto",
    mmap: bool = False,
    env: VecEnv | None = None,
    progress: bool | None = None,
) -> Buffer:
    """The buffer in the file ``path``, which must be of ``buffer_class`` or a class derived from it."""
    with Container.open(path) as file:
        cls = _class_to_load(buffer_class, file)
        arguments = decode(file.meta.get("arguments"))
        if not isinstance(arguments, dict):
            raise CorruptDataError(f"{path} makes no sense: it has no arguments for a buffer.")
        if env is not None:
            _check_spaces(path, env, arguments)
        size = sum(array.nbytes for array in file.arrays.values())
        with _bar(f"loading {path.name}", size, progress) as update, _as_corrupt(path):
            buffer = _construct(cls, arguments, device, env)
            state = file.meta.get("state")
            buffer._restore(SavedState(file, state if isinstance(state, dict) else {}, mmap=mmap, progress=update))
    return buffer


def _construct(cls: type[Buffer], arguments: dict[str, Any], device: th.device | str, env: VecEnv | None) -> Buffer:
    if "env" in arguments:
        arguments["env"] = env
    with warnings.catch_warnings():
        # Whoever saved it was warned of what it does not store exactly.
        warnings.simplefilter("ignore")
        return cls(**arguments, device=device)


def _library_class(cls: type[Any]) -> type[Any]:
    """The class of this library that a user's class is derived from."""
    return next(base for base in cls.__mro__ if base.__name__ in CLASSES and base.__module__.startswith(_PACKAGE))


_PACKAGE = __name__.split(".", maxsplit=1)[0]


def _class_to_load(wanted: type[Buffer], file: Container) -> type[Buffer]:
    name = file.meta.get("class")
    if not isinstance(name, str) or name not in CLASSES:
        raise CorruptDataError(f"{file.path} makes no sense: it is of class {name!r}.")
    saved = getattr(importlib.import_module(f"{_PACKAGE}.{CLASSES[name]}"), name)
    if issubclass(saved, wanted):
        return saved  # type: ignore[no-any-return]
    if wanted.__name__ not in CLASSES and issubclass(wanted, saved):
        return wanted  # a class of the user
    raise ConfigurationError(f"{file.path} holds a {name}, not a {wanted.__name__}: use {name}.load().")


def _check_spaces(path: Path, env: VecEnv, arguments: dict[str, Any]) -> None:
    try:
        check_for_correct_spaces(env, arguments["observation_space"], arguments["action_space"])
    except ValueError as error:
        raise ConfigurationError(f"{path} was saved for another environment. {error}") from error


@contextmanager
def _as_corrupt(path: Path) -> Iterator[None]:
    """Nothing that a file says may surprise whoever loads it with errors of another kind."""
    try:
        yield
    except ExtraBuffersError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, MemoryError) as error:
        raise CorruptDataError(f"{path} makes no sense: {error}") from error


@contextmanager
def _bar(what: str, size: int, show: bool | None) -> Iterator[Progress]:
    if show is None:
        show = size >= _WORTH_A_BAR and sys.stderr.isatty()
    with tqdm(total=size, desc=what, unit="B", unit_scale=True, disable=not show, leave=False) as bar:
        yield bar.update
