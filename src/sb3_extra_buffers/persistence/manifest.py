"""Header and manifest of a container, read and checked. The format is described in :mod:`.container`."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from sb3_extra_buffers.errors import CorruptDataError, FileFormatError

MAGIC = b"\x89SB3XB\r\n"
VERSION = 1
BLOCK_BYTES = 1 << 18

HEADER = struct.Struct("<8sIIQQQ16s56x")
_DIGEST_BYTES = 16
HEADER_BYTES = HEADER.size + _DIGEST_BYTES
DTYPES = re.compile(r"[<|][biuf](1|2|4|8|16)")
_MOST_ZEROS = 16 << 30
"""Arrays may have this many zeros, which take no space in the file and only address space when they are read."""
_MOST_REPETITIONS = 256


class Block(NamedTuple):
    offset: int
    digest: str


class StoredArray(NamedTuple):
    """An array in a container. A block that is ``None`` is all zeros."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    blocks: list[Block | None]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        return sum(length for block, _, length in self.parts() if block is not None)

    def parts(self) -> Iterator[tuple[Block | None, int, int]]:
        """Each block with its start in the array and its length, in bytes."""
        for number, block in enumerate(self.blocks):
            start = number * BLOCK_BYTES
            yield block, start, min(BLOCK_BYTES, self.nbytes - start)


class Manifest(NamedTuple):
    generation: int
    """The number of saves."""
    end: int
    """The end of the manifest. Bytes after it are ignored."""
    text: bytes
    meta: dict[str, Any]
    arrays: dict[str, StoredArray]


def read_manifest(path: Path, file: BinaryIO) -> Manifest:
    """The newest manifest of a file, checked."""
    header = file.read(HEADER_BYTES)
    if not header.startswith(MAGIC):
        raise FileFormatError(f"{path} is not a saved buffer of this library.")
    if len(header) < HEADER_BYTES:
        raise CorruptDataError(f"{path} ends after {len(header)} bytes: it is not complete.")
    _, version, _, generation, offset, length, digest = HEADER.unpack_from(header)
    is_intact = xxhash.xxh3_128_digest(header[: HEADER.size]) == header[HEADER.size :]
    if is_intact and version > VERSION:
        raise FileFormatError(
            f"{path} is of format version {version}, and this version of sb3-extra-buffers reads up to {VERSION}. "
            "Update it: pip install --upgrade sb3-extra-buffers"
        )
    if not is_intact or version < 1:
        raise CorruptDataError(f"{path} is damaged: its header does not agree with its checksum.")
    size = os.fstat(file.fileno()).st_size
    if offset < HEADER_BYTES or offset + length > size:
        raise CorruptDataError(f"{path} has {size} of {offset + length} bytes: it is not complete.")
    file.seek(offset)
    text = file.read(length)
    if xxhash.xxh3_128_digest(text) != digest:
        raise CorruptDataError(f"{path} is damaged: its manifest does not agree with its checksum.")
    end = offset + length
    try:
        manifest = json.loads(text)
        meta = manifest["meta"]
        arrays = {name: _parse_array(entry, end) for name, entry in manifest["arrays"].items()}
        claimed = sum(array.nbytes for array in arrays.values())
        if not isinstance(meta, dict):
            raise ValueError(f"its meta is not a dict: {meta!r}")
        if claimed > _MOST_ZEROS + _MOST_REPETITIONS * end:
            raise ValueError(f"its arrays would have {claimed:,} bytes, but the file has only {end:,}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, MemoryError) as error:
        raise CorruptDataError(f"{path} is corrupt, in its manifest: {error}.") from error
    return Manifest(generation, end, text, meta, arrays)


def _parse_array(entry: Any, end: int) -> StoredArray:
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or not DTYPES.fullmatch(dtype):
        raise ValueError(f"not a numeric dtype: {dtype!r}")
    if not isinstance(shape, list) or len(shape) > 16 or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"not a shape: {shape!r}")
    blocks = [None if block is None else Block(*block) for block in entry["blocks"]]
    stored = StoredArray(np.dtype(dtype), tuple(shape), blocks)
    if len(blocks) != -(-stored.nbytes // BLOCK_BYTES):
        raise ValueError(f"{len(blocks)} blocks for {stored.nbytes} bytes")
    for block, _, length in stored.parts():
        if block is not None and not (
            type(block.offset) is int and HEADER_BYTES <= block.offset <= end - length and isinstance(block.digest, str)
        ):
            raise ValueError(f"a block at offset {block.offset!r} in a file of {end} bytes")
    return stored
