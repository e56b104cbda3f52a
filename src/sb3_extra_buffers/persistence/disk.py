"""Making sure that what was written is on the disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """For files that were created, renamed or removed in it."""
    if os.name == "posix":  # elsewhere, directories cannot be opened
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_all(folder: Path) -> None:
    """For files in it that others have written."""
    for path in folder.iterdir():
        with path.open("r+b") as file:
            sync(file)
    sync_directory(folder)


def create(path: Path) -> BinaryIO:
    """A new file, also where there is one of that name. Where that is a link, what it leads to is left alone."""
    path.unlink(missing_ok=True)
    return path.open("x+b")


def replace(path: Path, content: bytes) -> None:
    """Write a small file so that at any moment the old or the new one is there, whole."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with create(unfinished) as file:
        file.write(content)
        sync(file)
    unfinished.replace(path)
    sync_directory(path.parent)
