"""A container: a file of named arrays and JSON. Saving to it again writes only what has changed.

::

    header | block | block | ... | manifest | block | ... | manifest
    └ where the newest manifest is ────────────────────────▶┘

An array is cut into blocks of 256 KiB. The manifest, which is JSON, has the dtype and shape of each array, and the
offset and checksum of each block. Saving again appends the blocks whose checksums are new, and a new manifest. Then it
overwrites the header, 128 bytes in one write, which makes the new manifest valid. Nothing else is ever overwritten.
Once more than half of the file is out of date, a save writes everything to a new file, which replaces the old one.

Bytes after the newest manifest were left behind by a save that did not finish. All other bytes are covered by a
checksum (XXH3, 128 bits): the header ends with its own, and contains that of the manifest. See ``docs/saving.md`` for
the bytes of the header, the manifest and the blocks.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from sb3_extra_buffers.anonymous_memory import zeros
from sb3_extra_buffers.errors import CorruptDataError, FileFormatError, SaveError
from sb3_extra_buffers.persistence.disk import replacing, sync
from sb3_extra_buffers.state import Progress
from sb3_extra_buffers.storage.memory import Memory, PartOfBytes, TemporaryMemory, temporary_file

MAGIC = b"\x89SB3XB\r\n"
VERSION = 1
BLOCK_BYTES = 1 << 18

HEADER = struct.Struct("<8sIIQQQ16s56x")
HEADER_BYTES = HEADER.size + 16
"""The size of the header with its checksum."""
DTYPES = re.compile(r"[<|][biuf](1|2|4|8|16)")
"""The dtypes that arrays may have."""
_BLOCK_ALIGNMENT = 64
"""Blocks are padded to a multiple of this many bytes."""
_MIN_OUTDATED_BYTES = 1 << 20
"""A file with fewer outdated bytes than this is not worth writing anew."""
_MOST_ZEROS = 16 << 30
"""How many bytes of zeros the arrays may have. In the file, they take no space, and when read, only address space."""
_MAX_REPETITION = 256
"""How many times larger than the file the arrays may be, besides zeros: equal blocks are stored once."""

Bytes = npt.NDArray[np.uint8]
Value = npt.NDArray[Any] | PartOfBytes


class Block(NamedTuple):
    """Where a block is in the file, and its checksum."""

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
        """Bytes of all blocks that are not zeros."""
        return sum(length for block, _, length in self.parts() if block is not None)

    def parts(self) -> Iterator[tuple[Block | None, int, int]]:
        """Each block with its start in the array and its length, in bytes."""
        for number, block in enumerate(self.blocks):
            start = number * BLOCK_BYTES
            yield block, start, min(BLOCK_BYTES, self.nbytes - start)


class Container:
    """A file whose manifest was read and checked. Use :meth:`open` in a ``with`` statement."""

    generation: int
    """How many times the file was saved to."""
    end: int
    """The end of the newest manifest. Bytes after it are ignored."""
    text: bytes
    """The newest manifest."""
    meta: dict[str, Any]
    arrays: dict[str, StoredArray]

    def __init__(self, path: Path, file: BinaryIO, is_mapped: bool = False, most_zeros: int = _MOST_ZEROS) -> None:
        self.path = path
        self.is_mapped = is_mapped
        """Whether :meth:`map` maps large arrays."""
        self._file = file
        self._read_manifest(most_zeros)

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, mmap: bool = False) -> Iterator[Container]:
        if not path.is_file() and path.exists():  # opening a pipe could block
            raise FileFormatError(f"{path} is not a saved buffer of this library: it is not a regular file.")
        with path.open("rb") as file:
            yield cls(path, file, mmap)

    def _read_manifest(self, most_zeros: int) -> None:
        """Read the header and the newest manifest, and check all their values except ``meta``."""
        header = self._file.read(HEADER_BYTES)
        if not header.startswith(MAGIC):
            raise FileFormatError(f"{self.path} is not a saved buffer of this library.")
        if len(header) < HEADER_BYTES:
            raise CorruptDataError(f"{self.path} ends after {len(header)} bytes: it is not complete.")
        _, version, _, self.generation, offset, length, digest = HEADER.unpack_from(header)
        is_intact = xxhash.xxh3_128_digest(header[: HEADER.size]) == header[HEADER.size :]
        if is_intact and version > VERSION:
            raise FileFormatError(
                f"{self.path} is of format version {version}, but this version of sb3-extra-buffers reads up to "
                f"{VERSION}. Update it: pip install --upgrade sb3-extra-buffers"
            )
        if not is_intact or version < 1:
            raise CorruptDataError(f"{self.path} is damaged: its header does not agree with its checksum.")
        size = self._file.seek(0, os.SEEK_END)
        if offset < HEADER_BYTES or offset + length > size:
            raise CorruptDataError(f"{self.path} has {size} of {offset + length} bytes: it is not complete.")
        self._file.seek(offset)
        self.text = self._file.read(length)
        if xxhash.xxh3_128_digest(self.text) != digest:
            raise CorruptDataError(f"{self.path} is damaged: its manifest does not agree with its checksum.")
        self.end = offset + length
        try:
            manifest = json.loads(self.text)
            self.meta = manifest["meta"]
            self.arrays = {name: _parse_array(entry, self.end) for name, entry in manifest["arrays"].items()}
            claimed = sum(array.nbytes for array in self.arrays.values())
            if not isinstance(self.meta, dict):
                raise ValueError(f"its meta is not a dict: {self.meta!r}")
            if claimed > most_zeros + _MAX_REPETITION * self.end:
                raise ValueError(f"its arrays would have {claimed:,} bytes, but the file has only {self.end:,}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, MemoryError) as error:
            raise CorruptDataError(f"{self.path} is corrupt, in its manifest: {error}.") from error

    @property
    def stored_bytes(self) -> int:
        """Bytes of all blocks that the manifest refers to, each counted once."""
        parts = (part for array in self.arrays.values() for part in array.parts())
        return sum({block.offset: length for block, _, length in parts if block is not None}.values())

    def read(self, name: str, progress: Progress | None = None, into: Bytes | None = None) -> npt.NDArray[Any]:
        """Read an array and compare its checksums.

        :param into: Zeroed memory to read the array into.
        """
        stored = self.arrays[name]
        array = zeros(stored.shape, stored.dtype) if into is None else into[: stored.nbytes]
        target = array.reshape(-1).view(np.uint8)
        for start, block in self._blocks(name, progress):
            target[start : start + len(block)] = block
        return array

    def map(self, name: str, progress: Progress | None = None) -> Memory | None:
        """Copy an array to an unnamed temporary file in the same folder, and map that. Changes stay in memory.

        Returns ``None`` if arrays are not to be mapped, or if this one is smaller than a block.
        """
        stored = self.arrays[name]
        if not self.is_mapped or stored.nbytes < BLOCK_BYTES:
            return None
        with temporary_file(self.path.parent) as file:
            file.truncate(stored.nbytes)
            for start, block in self._blocks(name, progress):
                file.seek(start)
                file.write(block)
            file.flush()
            return TemporaryMemory(file, self.path.parent)

    def verify(self, progress: Progress | None = None) -> list[str]:
        """Compare all checksums. Returns the names of the damaged arrays."""
        damaged = []
        for name in self.arrays:
            try:
                for _ in self._blocks(name, progress):
                    pass
            except CorruptDataError:
                damaged.append(name)
        return damaged

    def _blocks(self, name: str, progress: Progress | None) -> Iterator[tuple[int, Bytes]]:
        """Yield the start and the bytes of each block that is not zeros, after comparing its checksum."""
        for block, start, length in self.arrays[name].parts():
            if block is not None:
                data = _read_block(self._file, block, length)
                if len(data) < length:
                    raise CorruptDataError(f"{self.path} ends in the middle of {name!r}: it is not complete.")
                if xxhash.xxh3_128_hexdigest(data) != block.digest:
                    raise CorruptDataError(f"{self.path} is damaged: {name!r} does not agree with its checksum.")
                yield start, np.frombuffer(data, dtype=np.uint8, count=length)
            if progress is not None:
                progress(length)


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


def write(path: Path, meta: Mapping[str, Any], arrays: Mapping[str, Value], progress: Progress | None = None) -> int:
    """Write ``meta`` and ``arrays`` to the container ``path``, and return the number of bytes written.

    Undamaged blocks of an existing container are used again. If the process is killed, the file holds either all of the
    old or all of the new contents.
    """
    path = Path(os.path.realpath(path))
    before = _usable(path)
    try:
        with replacing(path) if before is None else path.open("r+b") as file:
            return _append(file, before, meta, arrays, progress)
    except OSError as error:
        raise SaveError(
            f"{path} could not be written: {error.strerror or error}. Its last complete save is still valid."
        ) from error


def pack(meta: Mapping[str, Any], arrays: Mapping[str, Value]) -> bytes:
    """A container as bytes, for :func:`unpack`."""
    file = io.BytesIO(bytes(HEADER_BYTES))
    file.seek(HEADER_BYTES)
    manifest = _Writer(file, {}, None).write(meta, arrays)
    header = _header(file.tell(), manifest, 1)
    file.write(manifest)
    return header + file.getbuffer()[HEADER_BYTES:]


def unpack(data: bytes, name: str, most_zeros: int = _MOST_ZEROS) -> Container:
    """Open the container that :func:`pack` returned.

    :param name: The name of the container in error messages.
    :param most_zeros: How many bytes of zeros its arrays may have.
    """
    return Container(Path(name), io.BytesIO(data), most_zeros=most_zeros)


def _usable(path: Path) -> Container | None:
    """The container at ``path`` to append to; ``None`` if it is missing, damaged or more than half out of date."""
    try:
        with Container.open(path) as container:
            is_outdated = container.end > 2 * container.stored_bytes + _MIN_OUTDATED_BYTES
            return None if is_outdated else container
    except (OSError, CorruptDataError, FileFormatError):
        return None


def _append(
    file: BinaryIO,
    before: Container | None,
    meta: Mapping[str, Any],
    arrays: Mapping[str, Value],
    progress: Progress | None,
) -> int:
    """Append blocks and a manifest to the container ``before``, or to a new file, and make the manifest valid."""
    stored = [] if before is None else [block for array in before.arrays.values() for block in array.blocks]
    end, generation = (HEADER_BYTES, 0) if before is None else (before.end, before.generation)
    file.truncate(end)  # removes what an unfinished save may have left behind
    file.seek(end)
    try:
        writer = _Writer(file, {block.digest: block for block in stored if block is not None}, progress)
        manifest = writer.write(meta, arrays)
        if before is not None and manifest == before.text:
            sync(file)  # nothing has changed, but the last save may have been killed before its own sync
            return 0
        offset = file.tell()
        file.write(manifest)
        sync(file)
    except BaseException:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise
    # From here on never truncate: the header on disk may be the old or the new one.
    file.seek(0)
    file.write(_header(offset, manifest, generation + 1))
    sync(file)
    return writer.written + len(manifest)


def _header(offset: int, manifest: bytes, generation: int) -> bytes:
    header = HEADER.pack(MAGIC, VERSION, 0, generation, offset, len(manifest), xxhash.xxh3_128_digest(manifest))
    return header + xxhash.xxh3_128_digest(header)


class _Writer:
    """Appends the blocks of arrays to a file, except for those that the file already has."""

    def __init__(self, file: BinaryIO, known: dict[str, Block], progress: Progress | None) -> None:
        self._file = file
        self._known = known
        self._intact: set[str] = set()
        """Checksums of blocks that this save has written, or read and compared. Other blocks may be damaged."""
        self._progress = progress
        self.written = 0

    def write(self, meta: Mapping[str, Any], arrays: Mapping[str, Value]) -> bytes:
        """Write blocks, and return the manifest."""
        entries = {}
        for name, value in arrays.items():
            array = value.data if isinstance(value, PartOfBytes) else value
            if not DTYPES.fullmatch(array.dtype.str):
                raise SaveError(f"The array {name!r} is of dtype {array.dtype}, which cannot be saved.")
            blocks = [self._write_block(data) for data in _cut(value)]
            entries[name] = {"dtype": array.dtype.str, "shape": list(array.shape), "blocks": blocks}
        return json.dumps({"meta": meta, "arrays": entries}, separators=(",", ":"), allow_nan=False).encode()

    def _write_block(self, block: Bytes | None) -> Block | None:
        if self._progress is not None:
            self._progress(BLOCK_BYTES if block is None else len(block))
        if block is None or not block.any():
            return None
        data = block.tobytes() + bytes(-len(block) % _BLOCK_ALIGNMENT)
        digest = xxhash.xxh3_128_hexdigest(data)
        found = self._known.get(digest)
        if found is None or not self._is_intact(found, data):
            found = self._known[digest] = Block(self._file.tell(), digest)
            self._file.write(data)
            self.written += len(data)
        self._intact.add(digest)
        return found

    def _is_intact(self, block: Block, data: bytes) -> bool:
        if block.digest in self._intact:
            return True
        end = self._file.tell()
        try:
            return _read_block(self._file, block, len(data)) == data
        finally:
            self._file.seek(end)


def _cut(value: Value) -> Iterator[Bytes | None]:
    """Cut an array into blocks. A block without live bytes is ``None``."""
    array = value.data if isinstance(value, PartOfBytes) else value
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, len(data), BLOCK_BYTES):
        is_live = not isinstance(value, PartOfBytes) or value.touches(start, start + BLOCK_BYTES)
        yield data[start : start + BLOCK_BYTES] if is_live else None


def _read_block(file: BinaryIO, block: Block, length: int) -> bytes:
    """Read a block with its padding, or fewer bytes if the file ends in it."""
    file.seek(block.offset)
    return file.read(length + -length % _BLOCK_ALIGNMENT)
