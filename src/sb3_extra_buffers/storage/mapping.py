"""Arrays of files, mapped into memory: changes stay private, and only changed pages take memory.

A file that was saved to several times holds an array in pieces. They are mapped side by side into one range of
addresses, so that they look like one array. Addresses behind the array are reserved, which costs nothing, so that it
can grow in place.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import weakref
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_MAP_FIXED = 0x10
_READ_WRITE = 1 | 2
_MOST_PIECES = 16_384
"""Linux lets a process have 65,530 mappings."""
_RESERVED = 1 << 30
_COMPARED = 1 << 16


class Piece(NamedTuple):
    """``length`` bytes of an array, from ``start`` on, that lie at ``offset`` in a file; ``None`` are zeros."""

    start: int
    length: int
    offset: int | None


def can_map(pieces: list[Piece]) -> bool:
    """Whether :class:`PrivateMap` can map an array of these pieces on this machine."""
    if _library() is None or not 0 < len(pieces) <= _MOST_PIECES:
        return False
    # Several pieces must start at the border of a page.
    return len(pieces) == 1 or all((piece.offset or 0) % mmap.PAGESIZE == 0 for piece in pieces)


class PrivateMap:
    """An array of pieces of a file, with room to grow."""

    def __init__(self, descriptor: int, pieces: list[Piece], room: int = 0) -> None:
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)
        self._pieces = pieces
        self._size = pieces[-1].start + pieces[-1].length
        # An array that starts in the middle of a page of the file starts there in memory, too.
        self._skipped = (pieces[0].offset or 0) % mmap.PAGESIZE
        self._writable = 0
        address, self._room = _reserve(self._skipped + max(self._size, room))
        self._address = address
        self._memory: Any = (ctypes.c_uint8 * self._room).from_address(address)
        # Arrays that refer to the bytes keep them mapped, also while the interpreter exits.
        weakref.finalize(self._memory, _unmap, address, self._room).atexit = False
        for piece in pieces:
            self._map_piece(piece)

    def view(self, size: int) -> Bytes:
        """The first ``size`` bytes, of the array or of the room behind it. Older views stay valid."""
        needed = self._skipped + size
        if needed > self._room:
            self._move(2 * size)
            needed = self._skipped + size
        if needed > self._writable:
            _call("mprotect", self._address + self._writable, _pages(needed) - self._writable, _READ_WRITE)
            self._writable = _pages(needed)
        return np.frombuffer(self._memory, dtype=np.uint8, count=size, offset=self._skipped)

    def _map_piece(self, piece: Piece) -> None:
        start = self._skipped + piece.start if piece.start else 0
        length = self._skipped + piece.start + piece.length - start
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        if piece.offset is None:
            _call("mmap", self._address + start, length, _READ_WRITE, flags | mmap.MAP_ANONYMOUS, -1, 0)
        else:
            offset = piece.offset - piece.offset % mmap.PAGESIZE
            _call("mmap", self._address + start, length, _READ_WRITE, flags, self._descriptor, offset)
        self._writable = _pages(start + length)

    def _move(self, room: int) -> None:
        """Move to a larger range of addresses. Of the file's bytes, only changed ones are copied."""
        other = PrivateMap(self._descriptor, self._pieces, room)
        used = self._writable - self._skipped
        old, new = self.view(used), other.view(used)
        for start in range(0, used, _COMPARED):
            part = slice(start, start + _COMPARED)
            if start + _COMPARED > self._size or not np.array_equal(old[part], new[part]):
                new[part] = old[part]
        self._memory, self._address, self._room = other._memory, other._address, other._room
        self._writable = other._writable


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _reserve(size: int) -> tuple[int, int]:
    """Reserve addresses without memory, many more than asked for if possible."""
    room = _pages(8 * size + _RESERVED)
    while True:
        try:
            return _call("mmap", None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0), room
        except OSError as error:
            if error.errno != errno.ENOMEM or room == _pages(size):
                raise
            room = max(_pages(size), _pages(room // 4))


def _call(name: str, *arguments: Any) -> int:
    library = _library()
    assert library is not None  # can_map() was called before
    found: int = getattr(library, name)(*arguments)
    if found in (-1, ctypes.c_size_t(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def _unmap(address: int, size: int) -> None:
    _call("munmap", address, size)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The C library: Python's ``mmap`` cannot choose the address of a mapping."""
    if sys.platform not in ("linux", "darwin") or sys.maxsize < 1 << 32:
        return None
    library = ctypes.CDLL(None, use_errno=True)
    size, number, address = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    library.mmap.restype = size
    library.mmap.argtypes = [address, size, number, number, number, ctypes.c_int64]
    library.mprotect.argtypes = [address, size, number]
    library.munmap.argtypes = [address, size]
    return library
