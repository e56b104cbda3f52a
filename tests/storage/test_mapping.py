"""Files mapped into memory piece by piece."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from sb3_extra_buffers.storage import mapping
from sb3_extra_buffers.storage.mapping import Piece, PrivateMap, can_map
from sb3_extra_buffers.storage.memory import NamelessMemory, PrivateMemory

pytestmark = pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="pieces cannot be mapped elsewhere")

PAGE = resource.getpagesize()
CONTENT = np.random.default_rng(0).integers(0, 256, size=20 * PAGE + 100, dtype=np.uint8)
PIECES = [
    Piece(0, 2 * PAGE, 8 * PAGE),
    Piece(2 * PAGE, 3 * PAGE, None),
    Piece(5 * PAGE, PAGE, 0),
    Piece(6 * PAGE, 50, 20 * PAGE),
]
SIZE = 6 * PAGE + 50


@pytest.fixture
def file(tmp_path: Path) -> Iterator[BinaryIO]:
    (tmp_path / "file").write_bytes(CONTENT.tobytes())
    with (tmp_path / "file").open("rb") as opened:
        yield opened


def expected() -> np.ndarray:
    parts = [
        np.zeros(piece.length, np.uint8)
        if piece.offset is None
        else CONTENT[piece.offset : piece.offset + piece.length]
        for piece in PIECES
    ]
    return np.concatenate(parts)


def test_pieces_look_like_one_array(file: BinaryIO) -> None:
    np.testing.assert_array_equal(PrivateMap(file.fileno(), PIECES).view(SIZE), expected())


def test_changes_stay_private(file: BinaryIO, tmp_path: Path) -> None:
    first, second = (PrivateMap(file.fileno(), PIECES).view(SIZE) for _ in range(2))
    first[:] = 7
    np.testing.assert_array_equal(second, expected())
    assert (tmp_path / "file").read_bytes() == CONTENT.tobytes()


@pytest.mark.parametrize("offset", [0, 64, PAGE - 64, 3 * PAGE + 128])
def test_one_piece_may_begin_anywhere(offset: int, file: BinaryIO) -> None:
    mapped = PrivateMap(file.fileno(), [Piece(0, 5 * PAGE, offset)])
    np.testing.assert_array_equal(mapped.view(5 * PAGE), CONTENT[offset : offset + 5 * PAGE])
    larger = mapped.view(50 * PAGE)
    larger[5 * PAGE :] = 3
    np.testing.assert_array_equal(larger[: 5 * PAGE], CONTENT[offset : offset + 5 * PAGE])


@pytest.mark.parametrize("reserved", [1 << 30, 0], ids=["with room", "without room"])
def test_growing_keeps_what_was_written(reserved: int, file: BinaryIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_RESERVED", reserved)
    memory = PrivateMemory(PrivateMap(file.fileno(), PIECES), SIZE)
    content, before = expected(), memory.data
    for size in (SIZE + PAGE, 4 * SIZE, 60 * SIZE, 5000 * SIZE):
        before[3] = content[3] = size % 251
        memory.resize(size)
        assert len(memory.data) == size
        memory.data[len(before) :] = size % 13
        content = np.concatenate([content, np.full(size - len(content), size % 13, np.uint8)])
        np.testing.assert_array_equal(memory.data, content)
        before = memory.data


def test_who_looks_at_bytes_keeps_them(file: BinaryIO) -> None:
    mapped = PrivateMap(file.fileno(), PIECES)
    view = mapped.view(SIZE)[PAGE:]
    del mapped
    gc.collect()
    np.testing.assert_array_equal(view, expected()[PAGE:])


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_nothing_is_left_behind(file: BinaryIO) -> None:
    def count() -> tuple[int, int]:
        gc.collect()
        return Path("/proc/self/maps").read_text().count(file.name), len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    view = PrivateMap(file.fileno(), PIECES).view(SIZE)
    assert count()[0] > before[0]
    del view
    assert count() == before


def test_pieces_that_cannot_be_mapped() -> None:
    assert can_map(PIECES)
    assert can_map([Piece(0, 5000, 64)])
    assert not can_map([])
    assert not can_map([Piece(0, PAGE, PAGE), Piece(PAGE, PAGE, 64)])
    assert not can_map([Piece(i, 1, None) for i in range(100_000)])


def test_few_addresses(file: BinaryIO) -> None:
    """Where a limit leaves no room to reserve, the array is mapped all the same."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE if sys.platform == "linux" else 1 << 34
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), hard))
    try:
        view = PrivateMap(file.fileno(), PIECES).view(SIZE)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    np.testing.assert_array_equal(view, expected())


def test_a_nameless_file(tmp_path: Path) -> None:
    memory = NamelessMemory(tmp_path, 5000)
    memory.data[:] = 5
    old = memory.data
    memory.resize(100_000)
    assert (memory.data[:5000] == 5).all()
    assert not memory.data[5000:].any()
    assert (old == 5).all()
    assert not list(tmp_path.iterdir())
