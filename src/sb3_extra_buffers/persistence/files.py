"""Saving buffers to files, and loading them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from sb3_extra_buffers.persistence import container
from sb3_extra_buffers.persistence.container import Container
from sb3_extra_buffers.persistence.folder import STATE
from sb3_extra_buffers.persistence.tree import SavedBuffer, as_corrupt, describe, read_arguments
from sb3_extra_buffers.state import Progress, SavedState

Buffer = TypeVar("Buffer", bound=SavedBuffer)

_LEAST_FOR_A_BAR = 64 << 20


def save(buffer: SavedBuffer, path: Path, progress: bool | None = None) -> int:
    """Write ``buffer`` to ``path`` and return how many bytes were written."""
    buffer._check_folder()
    meta, arrays = describe(buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    size = sum(value.data.nbytes for value in arrays.values())
    with bar(f"saving {path.name}", size, progress) as update:
        return container.write(path, meta, arrays, update)


def load(
    path: Path, create: Callable[[Any, dict[str, Any]], Buffer], mmap: bool = False, progress: bool | None = None
) -> Buffer:
    """The buffer in a file, or in the folder of a buffer on disk.

    :param create: Makes an empty buffer from the name of a class, which may be anything, and arguments.
    """
    with Container.open(state_file(path), mmap) as file, as_corrupt(path):
        class_name, arguments = file.meta.get("class"), read_arguments(file)
        if path.is_dir():
            opened = create(class_name, {**arguments, "storage": "mmap", "path": path})
            opened._check_folder()
            return opened
        with bar(f"loading {path.name}", sum(array.nbytes for array in file.arrays.values()), progress) as update:
            buffer = create(class_name, arguments)
            buffer._restore(SavedState(file, file.meta["state"], progress=update))
    return buffer


def state_file(path: Path) -> Path:
    """The container of a buffer: ``path`` itself, or a file in the folder of a buffer on disk."""
    return path / STATE if path.is_dir() else path


@contextmanager
def bar(what: str, size: int, show: bool | None) -> Iterator[Progress]:
    """A progress bar; where ``show`` is ``None``, only for large files and in a terminal."""
    if show is None:
        show = size >= _LEAST_FOR_A_BAR and sys.stderr.isatty()
    if not show:
        # Not a disabled bar: tqdm has a lock that all forks share, and a process that is killed keeps it.
        yield lambda count: None
        return
    with tqdm(total=size, desc=what, unit="B", unit_scale=True, leave=False) as shown:
        yield shown.update
