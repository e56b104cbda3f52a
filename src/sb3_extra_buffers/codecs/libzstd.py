"""libzstd's own functions, for kernels that decompress many records in one call.

The package ``zstandard`` contains libzstd twice: in its C extension, which does not export it, and in its CFFI module,
whose functions can be called by address. Where that module is missing, each record is decompressed by a Python call.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.base import Bytes, Indices

_ENTROPY_TABLE_BYTES = 1 << 12
"""Room for the header and the entropy tables of a dictionary, in bytes."""
_SAMPLE_LEVEL = 1
"""The level at which samples are compressed to make entropy tables."""
_DICTIONARY_MAGIC = (0xEC30A437).to_bytes(4, "little")
MISSING = -1
"""Stands for the address of a dictionary that does not exist; 0 means "no dictionary"."""
_BY_REFERENCE, _ANY_CONTENT = 1, 0
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class _DictionaryParameters(ctypes.Structure):
    _fields_ = (("level", ctypes.c_int), ("verbosity", ctypes.c_uint), ("number", ctypes.c_uint))


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ZSTD_createDCtx": (_POINTER, []),
    "ZSTD_freeDCtx": (_SIZE, [_POINTER]),
    "ZSTD_estimateDDictSize": (_SIZE, [_SIZE, ctypes.c_int]),
    "ZSTD_initStaticDDict": (_POINTER, [_POINTER, _SIZE, ctypes.c_char_p, _SIZE, ctypes.c_int, ctypes.c_int]),
    "ZDICT_finalizeDictionary": (
        _SIZE,
        [_POINTER, _SIZE, ctypes.c_char_p, _SIZE, ctypes.c_char_p, _POINTER, ctypes.c_uint, _DictionaryParameters],
    ),
    "ZDICT_isError": (ctypes.c_uint, [_SIZE]),
    "ZSTD_decompress_usingDDict": (_SIZE, [_POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER]),
}


@functools.cache
def _library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("zstandard._cffi") if importlib.util.find_spec("zstandard") else None
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        return None
    return library


@functools.cache
def decompress_function() -> int:
    """The address of ``ZSTD_decompress_usingDDict``, or 0 where libzstd cannot be loaded."""
    library = _library()
    return ctypes.cast(library.ZSTD_decompress_usingDDict, _POINTER).value or 0 if library else 0


def make_dictionary(content: bytes, samples: list[bytes]) -> bytes:
    """A dictionary with the given content, and with entropy tables made from ``samples``.

    Records then need no entropy tables of their own, which makes them smaller and faster to decompress. Where libzstd
    cannot be loaded, the dictionary has no tables.

    ``add`` waits for this function, so it compresses the samples at a low level. Higher levels take ten times as long
    and make records less than 1% smaller.
    """
    if content.startswith(_DICTIONARY_MAGIC):  # it would look like a dictionary with entropy tables
        content = b"\0" + content
    library = _library()
    if library is None:
        return content
    out = ctypes.create_string_buffer(len(content) + _ENTROPY_TABLE_BYTES)
    size = library.ZDICT_finalizeDictionary(
        out, len(out), content, len(content),
        b"".join(samples), (_SIZE * len(samples))(*map(len, samples)), len(samples),
        _DictionaryParameters(_SAMPLE_LEVEL, 0, 0),
    )  # fmt: skip
    return content if library.ZDICT_isError(size) else out.raw[:size]


class Dictionary:
    """A dictionary, prepared for decompression if libzstd can be loaded. Empty content means "no dictionary"."""

    def __init__(self, content: bytes) -> None:
        self.content = content  # libzstd has a pointer to these bytes
        self.address = 0
        """The address of the prepared dictionary; 0 if there is none."""
        self.is_valid = True
        """Whether libzstd accepts the content."""
        library = _library() if content else None
        # An array, because a method that frees memory of libzstd would swallow a Ctrl-C that comes while it runs.
        self._prepared: Bytes = np.empty(0, dtype=np.uint8)
        if library:
            size = library.ZSTD_estimateDDictSize(len(content), _BY_REFERENCE)
            self._prepared = np.empty(size, dtype=np.uint8)
            place = self._prepared.ctypes.data, size
            self.address = library.ZSTD_initStaticDDict(*place, content, len(content), _BY_REFERENCE, _ANY_CONTENT) or 0
            self.is_valid = self.address != 0

    @property
    def nbytes(self) -> int:
        return len(self.content) + self._prepared.nbytes


_idle_contexts: deque[int] = deque()
"""Decompression contexts that are not in use. A deque needs no lock, which a fork could leave locked in the child."""


@contextmanager
def contexts(n: int) -> Iterator[Indices]:
    """Lend ``n`` decompression contexts, given as addresses, to the caller until the block ends."""
    taken = [_take_context() for _ in range(n)]
    try:
        yield np.array(taken, dtype=np.int64)
    finally:
        _idle_contexts.extend(taken)


def _take_context() -> int:
    try:
        return _idle_contexts.pop()
    except IndexError:
        library = _library()
        assert library is not None
        address: int = library.ZSTD_createDCtx()
        return address
