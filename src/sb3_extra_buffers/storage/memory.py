"""Memory that is a mapped file, and bytes that are pickled piece by piece."""

from __future__ import annotations

import math
import mmap
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.anonymous_memory import AnonymousMemory, map_private
from sb3_extra_buffers.errors import CorruptDataError, SaveError
from sb3_extra_buffers.state import SavedState

_PIECE = 1 << 15
"""The bytes in one piece of a pickle. pickle keeps a thousand pieces in memory."""


class TemporaryMemory(AnonymousMemory):
    """Bytes of an unnamed temporary file in ``folder``, mapped copy-on-write: only changed pages take memory."""

    def __init__(self, file: BinaryIO, folder: Path) -> None:
        self._folder = folder
        self._map = map_private(os.fstat(file.fileno()).st_size, file.fileno())
        self._data = None

    def _copied(self, size: int) -> mmap.mmap:
        with temporary_file(self._folder) as file:
            file.write(self.data[:size])
            file.truncate(size)
            return map_private(size, file.fileno())


class FileMemory:
    """Bytes of a mapped file. The operating system may drop them from physical memory and read them again.

    The folder may be untrusted, so nothing is written through links that lead out of it.
    """

    def __init__(self, path: Path, create: bool = True) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self.data: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        with open_own(path, os.O_CREAT | os.O_EXCL if create else 0) as file:
            self._map_file(file)

    def resize(self, size: int) -> None:
        """Make room for ``size`` bytes, keeping the contents. Raises an error now if the disk is full."""
        with open_own(self.path) as file:
            _reserve(file, size, self.path)
            self._map_file(file)

    def flush(self) -> None:
        """Write all changes to disk."""
        if self._map is not None:
            self._map.flush()

    def _map_file(self, file: BinaryIO) -> None:
        # Arrays that other threads still use keep the older map of this file alive.
        if os.fstat(file.fileno()).st_size:
            self._map = mmap.mmap(file.fileno(), 0)
            self.data = np.frombuffer(self._map, dtype=np.uint8)


Memory = AnonymousMemory | FileMemory


class PartOfBytes:
    """Bytes of which only some ranges are live, to be saved or pickled.

    Pickling a large array takes twice its memory, and so does unpickling it. So these bytes are pickled in small
    pieces, as integers: pickle keeps all other large values in its memo until it is done.
    """

    def __init__(self, data: npt.NDArray[np.uint8], ranges: list[tuple[int, int]]) -> None:
        self.data = data
        self.ranges = [(start, end) for start, end in ranges if end > start]

    def touches(self, start: int, end: int) -> bool:
        """Whether any byte from ``start`` to ``end - 1`` is live."""
        return any(first < end and start < last for first, last in self.ranges)

    def __reduce__(self) -> tuple[Any, ...]:
        numbers = (int.from_bytes(self.data[start:end].data, "little") for start, end in _pieces(self.ranges))
        return Unpickled, (len(self.data), self.ranges), None, numbers


class Unpickled:
    """Writes the pieces of a :class:`PartOfBytes` to new memory while they are unpickled."""

    def __init__(self, size: int, ranges: list[tuple[int, int]]) -> None:
        self.size = size
        self.memory = AnonymousMemory(size)
        self._pieces = _pieces(ranges)

    def append(self, number: int) -> None:
        start, end = next(self._pieces)
        self.memory.data[start:end] = np.frombuffer(number.to_bytes(end - start, "little"), dtype=np.uint8)

    def extend(self, numbers: list[int]) -> None:
        for number in numbers:
            self.append(number)


def _pieces(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for start, end in ranges:
        for at in range(start, end, _PIECE):
            yield at, min(at + _PIECE, end)


def saved_memory(state: SavedState, name: str, at_least: int) -> tuple[Memory, int]:
    """Load bytes of a saved state into memory that can grow. Returns the memory, and how many bytes there are."""
    return state.memory(name, lambda size: AnonymousMemory(max(size, at_least)))


def zeros_in_file(folder: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Like ``numpy.zeros``, but in an unnamed temporary file, so that the system can drop it from physical memory."""
    with temporary_file(folder) as file:
        _reserve(file, max(math.prod(shape) * dtype.itemsize, 1), folder)
        mapped = mmap.mmap(file.fileno(), 0)
    return np.frombuffer(mapped, dtype=dtype, count=math.prod(shape)).reshape(shape)


def temporary_file(folder: Path) -> Any:
    """Open an unnamed file in ``folder``, or elsewhere if that is read-only. It is freed when its last map is gone."""
    return tempfile.TemporaryFile(dir=folder if os.access(folder, os.W_OK) else None)


def open_own(path: Path, flags: int = 0) -> BinaryIO:
    """Open a file for writing, unless it is a link, a pipe, or a file with a second name (hard link)."""
    flags |= os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if path.is_symlink():
        raise CorruptDataError(f"{path} is a symbolic link: the buffer would write outside its folder.")
    descriptor = os.open(path, flags, 0o666)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptDataError(f"{path} is not a regular file: the buffer cannot write to it.")
        if found.st_nlink > 1:
            raise CorruptDataError(
                f"{path} is a hard link: the buffer would change the same file under another name as well. "
                "Copy the folder, so that it has files of its own."
            )
        return os.fdopen(descriptor, "r+b")
    except BaseException:
        os.close(descriptor)
        raise


def _reserve(file: Any, size: int, path: Path) -> None:
    """Reserve disk space. Without it, writing to a map when the disk is full would kill the process."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
    except OSError as error:
        raise SaveError(f"{path} cannot grow to {size:,} bytes: {error.strerror}.") from error
