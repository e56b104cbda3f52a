"""Named arrays and some JSON in one file that can be saved to again and again.

::

    header | block | block | ... | manifest | block | ... | manifest
    └ where the newest manifest is ────────────────────────▶┘

An array is cut into blocks of 256 KiB. The manifest, JSON, says of each array its dtype, its shape, and of each block
where it lies and its checksum. Saving again appends the blocks whose checksums are new, and a manifest; then it
overwrites the header, 128 bytes in one write, which is the moment at which the new state becomes the state. Nothing
else is ever overwritten, so whoever has mapped the file keeps seeing what was there. When more than half of the file
is out of date, all is written to a new file, which takes the place of the old one.

Whatever follows the newest manifest was left behind by a save that did not finish. Every byte before it that means
anything is covered by a checksum (XXH3, 128 bits): the header ends with its own, and has that of the manifest.

All numbers are little-endian. The header is ``MAGIC``, the version (4 bytes), 4 zero bytes, how many times the file has
been saved to, offset and length of the manifest (8 bytes each), its checksum (16), zeros, the header's checksum (16).
A block takes a multiple of 64 bytes, filled up with zeros, which its checksum covers. Blocks of zeros are left out.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from sb3_extra_buffers.errors import CorruptDataError, FileFormatError, SaveError
from sb3_extra_buffers.persistence.disk import sync, sync_directory
from sb3_extra_buffers.storage.memory import PartOfBytes, zeros

MAGIC = b"\x89SB3XB\r\n"
VERSION = 1
BLOCK_BYTES = 1 << 18

_HEADER = struct.Struct("<8sIIQQQ16s56x")
_DIGEST_BYTES = 16
_HEADER_BYTES = _HEADER.size + _DIGEST_BYTES
_ALIGNMENT = 64
_MOST_ZEROS = 16 << 30
"""Blocks of zeros cost a file nothing and its reader, up to here, only address space."""
_MOST_REPETITIONS = 256
_DTYPE = re.compile(r"[<|][biuf](1|2|4|8|16)")
_WORTH_REWRITING = 1 << 20

Bytes = npt.NDArray[np.uint8]
Value = npt.NDArray[Any] | PartOfBytes
Progress = Callable[[int], object]
Result = TypeVar("Result")


class Block(NamedTuple):
    offset: int
    digest: str


class StoredArray(NamedTuple):
    """What a manifest says of an array. A block that is ``None`` is all zeros."""

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
        """Each block with where its bytes begin in the array, and how many they are."""
        for number, block in enumerate(self.blocks):
            start = number * BLOCK_BYTES
            yield block, start, min(BLOCK_BYTES, self.nbytes - start)


class Container:
    """A file that was read as far as its manifest, which is in order. Opened by :meth:`open`, and to be closed."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self.generation, self.end, manifest = _read_manifest(path, file)
        self.meta: dict[str, Any] = manifest["meta"]
        self.arrays = _parse_arrays(path, manifest["arrays"], self.end)

    @classmethod
    def open(cls, path: Path) -> Container:
        file = path.open("rb")
        try:
            return cls(path, file)
        except BaseException:
            file.close()
            raise

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    @property
    def stored_bytes(self) -> int:
        """Bytes of all blocks that the manifest refers to, each counted once."""
        parts = (part for array in self.arrays.values() for part in array.parts())
        return sum({block.offset: length for block, _, length in parts if block is not None}.values())

    def read(self, name: str, progress: Progress | None = None, into: Bytes | None = None) -> npt.NDArray[Any]:
        """An array, its checksums compared; in memory of zeros ``into``, if that is given."""
        stored = self._stored(name)
        array = zeros(stored.shape, stored.dtype) if into is None else into[: stored.nbytes]
        target = array.reshape(-1).view(np.uint8).data
        for block, start, length in stored.parts():
            if block is not None:
                self._read_block(name, block, target[start : start + length])
            if progress is not None:
                progress(length)
        return array

    def map(self, name: str) -> npt.NDArray[Any] | None:
        """An array in memory that is filled from the file as it is looked at, and whose changes stay private.

        Its checksums are not compared. ``None`` where the array does not lie in the file in one piece.
        """
        stored = self._stored(name)
        if stored.nbytes < BLOCK_BYTES or None in stored.blocks:
            return None
        first, *others = [block.offset for block in stored.blocks if block is not None]
        if any(offset != first + (i + 1) * BLOCK_BYTES for i, offset in enumerate(others)):
            return None
        mapped = np.memmap(self._file, stored.dtype, "c", first, stored.shape)
        return mapped.view(np.ndarray)

    def verify(self, progress: Progress | None = None) -> list[str]:
        """The arrays with a block that does not agree with its checksum."""
        wrong = []
        scratch = memoryview(bytearray(BLOCK_BYTES))
        for name, stored in self.arrays.items():
            try:
                for block, _, length in stored.parts():
                    if block is not None:
                        self._read_block(name, block, scratch[:length])
                    if progress is not None:
                        progress(length)
            except CorruptDataError:
                wrong.append(name)
        return wrong

    def _stored(self, name: str) -> StoredArray:
        try:
            return self.arrays[name]
        except KeyError:
            raise CorruptDataError(f"{self.path} has no array {name!r}.") from None

    def _read_block(self, name: str, block: Block, target: memoryview) -> None:
        padding = -len(target) % _ALIGNMENT
        self._file.seek(block.offset)
        n_read = self._file.readinto(target)  # type: ignore[attr-defined]  # a buffered reader
        rest = self._file.read(padding)
        if n_read != len(target) or len(rest) != padding:
            raise CorruptDataError(f"{self.path} ends in the middle of {name!r}: it is not complete.")
        if _digest(target, rest) != block.digest:
            raise CorruptDataError(f"{self.path} is damaged: {name!r} does not agree with its checksum.")


def write(path: Path, meta: Mapping[str, Any], arrays: Mapping[str, Value], progress: Progress | None = None) -> int:
    """Make ``path`` a container of ``meta`` and ``arrays``, and return the bytes written.

    Of a container that is there already, blocks that are needed again are kept. Whenever the process ends, what can be
    read is what was there before or what is there afterwards, whole.
    """
    path = Path(os.path.realpath(path))
    before = _usable(path)
    try:
        if before is None:
            return _write_anew(path, meta, arrays, progress)
        return _append(path, before, meta, arrays, progress)
    except OSError as error:
        raise SaveError(
            f"{path} could not be written: {error.strerror or error}. What was saved there before is still there."
        ) from error


def _usable(path: Path) -> Container | None:
    """The container at ``path`` that a save can add to, unless there is none or it is more than half out of date."""
    try:
        with Container.open(path) as container:
            is_outdated = container.end > 2 * container.stored_bytes + _WORTH_REWRITING
            return None if is_outdated else container
    except (OSError, CorruptDataError, FileFormatError):
        return None


def _write_anew(path: Path, meta: Mapping[str, Any], arrays: Mapping[str, Value], progress: Progress | None) -> int:
    # Always the same name, so that what a killed process leaves behind is replaced by the next save.
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(bytes(_HEADER_BYTES))
            header, end = _write_state(file, {}, 0, meta, arrays, progress)
            _write_header(file, header)
        unfinished.replace(path)
        sync_directory(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return end


def _append(
    path: Path, before: Container, meta: Mapping[str, Any], arrays: Mapping[str, Value], progress: Progress | None
) -> int:
    known = {block.digest: block for stored in before.arrays.values() for block in stored.blocks if block is not None}
    with path.open("r+b") as file:
        file.truncate(before.end)  # what a killed process may have left behind
        file.seek(before.end)
        try:
            header, end = _write_state(file, known, before.generation, meta, arrays, progress)
        except BaseException:
            with contextlib.suppress(OSError):
                file.truncate(before.end)
            raise
        _write_header(file, header)  # from here on nothing may be taken away: either header may be the one on disk
    return end - before.end


def _write_state(
    file: BinaryIO,
    known: dict[str, Block],
    generation: int,
    meta: Mapping[str, Any],
    arrays: Mapping[str, Value],
    progress: Progress | None,
) -> tuple[bytes, int]:
    """Write the blocks that are not known and the manifest to disk. Returns the header, and where the file ends."""
    entries = {}
    for name, value in arrays.items():
        array = value.data if isinstance(value, PartOfBytes) else value
        if not _DTYPE.fullmatch(array.dtype.str):
            raise SaveError(f"The array {name!r} is of dtype {array.dtype}, which no file can hold.")
        blocks = [_write_block(file, known, data, progress) for data in _cut(value)]
        entries[name] = {"dtype": array.dtype.str, "shape": list(array.shape), "blocks": blocks}
    manifest = json.dumps({"meta": meta, "arrays": entries}, separators=(",", ":"), allow_nan=False).encode()
    offset = file.tell()
    file.write(manifest)
    sync(file)
    digest = xxhash.xxh3_128_digest(manifest)
    header = _HEADER.pack(MAGIC, VERSION, 0, generation + 1, offset, len(manifest), digest)
    return header + xxhash.xxh3_128_digest(header), offset + len(manifest)


def _write_header(file: BinaryIO, header: bytes) -> None:
    """Make what was written before, and is on disk, the contents of the file."""
    file.seek(0)
    file.write(header)
    sync(file)


def _cut(value: Value) -> Iterator[memoryview | None]:
    """The blocks of an array; ``None`` for one that nobody will look at."""
    array = value.data if isinstance(value, PartOfBytes) else value
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    for start in range(0, len(data), BLOCK_BYTES):
        wanted = not isinstance(value, PartOfBytes) or value.touches(start, start + BLOCK_BYTES)
        yield data[start : start + BLOCK_BYTES] if wanted else None


def _write_block(
    file: BinaryIO, known: dict[str, Block], data: memoryview | None, progress: Progress | None
) -> Block | None:
    if progress is not None:
        progress(BLOCK_BYTES if data is None else len(data))
    if data is None:
        return None
    padding = bytes(-len(data) % _ALIGNMENT)
    digest = _digest(data, padding)
    if digest == _digest_of_zeros(len(data) + len(padding)):
        return None
    if digest not in known:
        known[digest] = Block(file.tell(), digest)
        file.write(data)
        file.write(padding)
    return known[digest]


def _digest(data: memoryview, padding: bytes) -> str:
    hasher = xxhash.xxh3_128(data)
    hasher.update(padding)
    return hasher.hexdigest()


_zeros: dict[int, str] = {}


def _digest_of_zeros(length: int) -> str:
    if length not in _zeros:
        _zeros[length] = xxhash.xxh3_128_hexdigest(bytes(length))
    return _zeros[length]


def _read_manifest(path: Path, file: BinaryIO) -> tuple[int, int, dict[str, Any]]:
    """How often the file was saved to, where its last manifest ends, and that manifest."""
    header = file.read(_HEADER_BYTES)
    if not header.startswith(MAGIC):
        raise FileFormatError(f"{path} is not a saved buffer of this library.")
    if len(header) < _HEADER_BYTES:
        raise CorruptDataError(f"{path} ends after {len(header)} bytes: it is not complete.")
    _, version, _, generation, offset, length, digest = _HEADER.unpack_from(header)
    is_intact = xxhash.xxh3_128_digest(header[: _HEADER.size]) == header[_HEADER.size :]
    if is_intact and version > VERSION:
        raise FileFormatError(
            f"{path} is of format version {version}, and this version of sb3-extra-buffers reads up to {VERSION}. "
            "Update it: pip install --upgrade sb3-extra-buffers"
        )
    if not is_intact or version < 1:
        raise CorruptDataError(f"{path} is damaged: its header does not agree with its checksum.")
    size = os.fstat(file.fileno()).st_size
    if offset < _HEADER_BYTES or offset + length > size:
        raise CorruptDataError(f"{path} has {size} of {offset + length} bytes: it is not complete.")
    file.seek(offset)
    text = file.read(length)
    if xxhash.xxh3_128_digest(text) != digest:
        raise CorruptDataError(f"{path} is damaged: its manifest does not agree with its checksum.")
    manifest = _parse(path, lambda: json.loads(text))
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(key), dict) for key in ("meta", "arrays")):
        raise CorruptDataError(f"{path} has no manifest with meta and arrays.")
    return generation, offset + length, manifest


def _parse_arrays(path: Path, entries: dict[str, Any], end: int) -> dict[str, StoredArray]:
    arrays = _parse(path, lambda: {name: _parse_array(entry, end) for name, entry in entries.items()})
    claimed = sum(array.nbytes for array in arrays.values())
    if claimed > _MOST_ZEROS + _MOST_REPETITIONS * end:
        raise CorruptDataError(f"{path} claims to hold {claimed:,} bytes, but has only {end:,}.")
    return arrays


def _parse_array(entry: Any, end: int) -> StoredArray:
    dtype, shape, blocks = entry["dtype"], entry["shape"], entry["blocks"]
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ValueError(f"no dtype of numbers: {dtype!r}")
    if not isinstance(shape, list) or len(shape) > 16 or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"no shape: {shape!r}")
    if not isinstance(blocks, list):
        raise ValueError("no list of blocks")
    parsed = [None if block is None else _parse_block(block) for block in blocks]
    stored = StoredArray(np.dtype(dtype), tuple(shape), parsed)
    if len(parsed) != -(-stored.nbytes // BLOCK_BYTES):
        raise ValueError(f"{len(parsed)} blocks for {stored.nbytes} bytes")
    for block, _, length in stored.parts():
        if block is not None and not _HEADER_BYTES <= block.offset <= end - length:
            raise ValueError(f"a block at {block.offset} of {end}")
    return stored


def _parse_block(block: Any) -> Block:
    offset, digest = block
    if type(offset) is not int or not isinstance(digest, str):
        raise ValueError(f"no block: {block!r}")
    return Block(offset, digest)


def _parse(path: Path, parse: Callable[[], Result]) -> Result:
    try:
        return parse()
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, MemoryError) as error:
        raise CorruptDataError(f"{path} has a manifest that makes no sense: {error}.") from error
