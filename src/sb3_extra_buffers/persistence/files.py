"""Saving buffers to files, and loading them."""

from __future__ import annotations

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

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.persistence import container
from sb3_extra_buffers.persistence.container import Container
from sb3_extra_buffers.persistence.description import arguments_of, as_corrupt, class_to_load, describe
from sb3_extra_buffers.persistence.folder import STATE
from sb3_extra_buffers.state import Progress, SavedState

if TYPE_CHECKING:
    from sb3_extra_buffers.compressed.base import BaseCompressedBuffer

Buffer = TypeVar("Buffer", bound="BaseCompressedBuffer")

_WORTH_A_BAR = 64 << 20


def save(buffer: BaseCompressedBuffer, path: Path, progress: bool | None = None) -> int:
    """Write ``buffer`` to ``path`` and return how many bytes that took."""
    buffer._check_folder()
    meta, arrays = describe(buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    size = sum(value.data.nbytes for value in arrays.values())
    with bar(f"saving {path.name}", size, progress) as update:
        return container.write(path, meta, arrays, update)


def load(
    buffer_class: type[Buffer],
    path: Path,
    device: th.device | str = "auto",
    mmap: bool = False,
    env: VecEnv | None = None,
    progress: bool | None = None,
) -> Buffer:
    """The buffer in a file, or in the folder of a buffer on disk, of ``buffer_class`` or a class derived from it."""
    with Container.open(state_file(path), mmap) as file:
        cls, arguments = class_to_load(buffer_class, file), arguments_of(file)
        if env is not None:
            with as_corrupt(path):
                _check_spaces(path, env, arguments)
        if "env" in arguments:
            arguments["env"] = env
        if path.is_dir():
            with as_corrupt(path):
                opened = _construct(cls, {**arguments, "storage": "mmap", "path": path}, device)
                opened._check_folder()
                return opened
        size = sum(array.nbytes for array in file.arrays.values())
        with bar(f"loading {path.name}", size, progress) as update, as_corrupt(path):
            buffer = _construct(cls, arguments, device)
            buffer._restore(SavedState(file, file.meta["state"], progress=update))
    return buffer


def state_file(path: Path) -> Path:
    """The file that says what a buffer is: ``path`` itself, or in the folder of a buffer on disk one of its files."""
    return path / STATE if path.is_dir() else path


@contextmanager
def bar(what: str, size: int, show: bool | None) -> Iterator[Progress]:
    """A progress bar; where ``show`` is ``None``, for what is large and if somebody is watching."""
    if show is None:
        show = size >= _WORTH_A_BAR and sys.stderr.isatty()
    if not show:
        # Not a bar that is disabled: tqdm has a lock that all forks share, and a process that is killed keeps it.
        yield lambda count: None
        return
    with tqdm(total=size, desc=what, unit="B", unit_scale=True, leave=False) as shown:
        yield shown.update


def _construct(cls: type[Buffer], arguments: dict[str, Any], device: th.device | str) -> Buffer:
    with warnings.catch_warnings():
        # Whoever saved it was warned of what it does not store exactly.
        warnings.simplefilter("ignore")
        return cls(**arguments, device=device)


def _check_spaces(path: Path, env: VecEnv, arguments: dict[str, Any]) -> None:
    try:
        check_for_correct_spaces(env, arguments["observation_space"], arguments["action_space"])
    except ValueError as error:
        raise ConfigurationError(f"{path} was saved for another environment. {error}") from error
