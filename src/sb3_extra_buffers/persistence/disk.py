"""Write files so that they survive a crash of the process or the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def sync(file: BinaryIO) -> None:
    """Wait until the contents of a file are on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Sync the names of files that were created, renamed or removed in a directory."""
    if os.name == "posix":  # elsewhere, directories cannot be opened
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Sync all files in a folder, but not those in folders below it."""
    for path in filter(Path.is_file, folder.iterdir()):
        with path.open("r+b") as file:
            sync(file)
    sync_directory(folder)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces ``path`` at the end of the block. If the block fails, ``path`` stays as it was."""
    # Always the same name, so that the next attempt replaces the file that a killed process has left behind.
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)  # not truncated: it may be a link, whose target must not change
        with unfinished.open("x+b") as file:
            yield file
            sync(file)
        unfinished.replace(path)
        sync_directory(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
