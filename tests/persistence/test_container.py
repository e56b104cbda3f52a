"""The file itself: what is written when, and what of it can be trusted."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.errors import CorruptDataError, FileFormatError, SaveError
from sb3_extra_buffers.persistence import container
from sb3_extra_buffers.persistence.container import BLOCK_BYTES, Container, write
from sb3_extra_buffers.storage.memory import PartOfBytes

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, size=3 * BLOCK_BYTES + 77, dtype=np.uint8)
NUMBERS = np.arange(1000).reshape(10, 100)
SMALL: dict[str, Any] = {"numbers": NUMBERS, "none": np.zeros((0, 3), np.float32), "scalar": np.array(1.5)}

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with Container.open(path) as file:
        return file.meta, {name: file.read(name) for name in file.arrays}


def assert_holds(path: Path, meta: dict[str, Any], arrays: dict[str, Any]) -> None:
    found_meta, found = read(path)
    assert found_meta == meta
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_what_is_written_is_read(path: Path) -> None:
    write(path, {"a": [1, None]}, {**SMALL, "noise": NOISE})
    assert_holds(path, {"a": [1, None]}, {**SMALL, "noise": NOISE})
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "u4", "i8", "f2", "f4", "f8"])
def test_dtypes(dtype: str, path: Path) -> None:
    array = NOISE[:800].view(dtype) if dtype != "?" else NOISE > 100
    write(path, {}, {"array": array})
    assert_holds(path, {}, {"array": array})


def test_objects_are_refused(path: Path) -> None:
    with pytest.raises(SaveError, match="object"):
        write(path, {}, {"array": np.array([{}])})


def test_zeros_and_bytes_that_mean_nothing_take_no_room(path: Path) -> None:
    part = PartOfBytes(np.tile(NOISE, 10), [(0, 10), (BLOCK_BYTES * 20, BLOCK_BYTES * 20 + 5)])
    size = write(path, {}, {"zeros": np.zeros(1 << 24), "part": part})
    assert size < 3 * BLOCK_BYTES
    _, found = read(path)
    assert not found["zeros"].any()
    for start, end in part.ranges:
        np.testing.assert_array_equal(found["part"][start:end], part.data[start:end])


def test_saving_again_writes_what_has_changed(path: Path) -> None:
    noise = np.tile(NOISE, 5) ^ np.repeat(np.arange(5, dtype=np.uint8), len(NOISE))
    first = write(path, {}, {"noise": noise, "numbers": NUMBERS})
    assert first > noise.nbytes
    assert write(path, {}, {"noise": noise, "numbers": NUMBERS}) < 4000
    noise[BLOCK_BYTES + 3] ^= 1
    assert BLOCK_BYTES < write(path, {}, {"noise": noise, "numbers": NUMBERS}) < BLOCK_BYTES + 4000
    assert_holds(path, {}, {"noise": noise, "numbers": NUMBERS})


def test_saving_again_does_not_keep_what_was_damaged_meanwhile(path: Path) -> None:
    arrays = {"noise": NOISE, "numbers": NUMBERS}
    write(path, {}, arrays)
    with Container.open(path) as file:
        first, *_, last = (block for block in file.arrays["noise"].blocks if block)
        numbers = file.arrays["numbers"].blocks[0]
    content = bytearray(path.read_bytes())
    assert numbers is not None
    for offset in (first.offset, last.offset + 70, numbers.offset + 5):
        content[offset] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptDataError):
        read(path)
    assert 2 * BLOCK_BYTES > write(path, {}, arrays) > BLOCK_BYTES  # the damaged blocks, and only those
    assert_holds(path, {}, arrays)


def test_saving_what_is_there_already_writes_nothing(path: Path) -> None:
    write(path, {"n": 1}, {"noise": NOISE})
    content = path.read_bytes()
    assert write(path, {"n": 1}, {"noise": NOISE}) == 0
    assert path.read_bytes() == content


@pytest.mark.parametrize("target", ["state", ".state.unfinished"])
def test_a_link_in_the_way_of_a_new_file_is_replaced(target: str, tmp_path: Path) -> None:
    """Saving to a link saves to what it leads to, but the user does not choose the name of an unfinished file."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (tmp_path / target).symlink_to(precious)
    write(tmp_path / "state", {}, SMALL)
    assert_holds(tmp_path / "state", {}, SMALL)
    assert (precious.read_bytes() == b"precious") == (target != "state")


def test_a_pipe_is_not_waited_for(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(FileFormatError, match="not a regular file"), Container.open(path):
        pass


def test_a_file_that_is_mostly_out_of_date_is_written_anew(path: Path) -> None:
    sizes = []
    for number in range(20):
        noise = np.tile(NOISE, 2) ^ np.uint8(number)
        write(path, {"number": number}, {"noise": noise})
        assert_holds(path, {"number": number}, {"noise": noise})
        sizes.append(path.stat().st_size)
    assert max(sizes) < 4 * noise.nbytes
    assert any(after < before for before, after in itertools.pairwise(sizes))


def test_what_a_killed_process_left_behind_is_cleaned_up(path: Path) -> None:
    write(path, {"n": 1}, SMALL)
    with path.open("ab") as file:
        file.write(b"half a block")
    path.with_name(f".{path.name}.unfinished").write_bytes(b"half a file")
    assert_holds(path, {"n": 1}, SMALL)
    write(path, {"n": 2}, SMALL)
    assert_holds(path, {"n": 2}, SMALL)
    write(path.with_name("other"), {}, SMALL)
    path.unlink()
    write(path, {"n": 3}, SMALL)
    assert {entry.name for entry in path.parent.iterdir()} == {"state", "other"}


@pytest.mark.parametrize("saves", [1, 2])
def test_one_flipped_bit_anywhere_is_found(saves: int, path: Path) -> None:
    for number in range(saves):
        write(path, {"number": number}, {**SMALL, "noise": NOISE[: BLOCK_BYTES + 5] ^ np.uint8(number)})
    intact = path.read_bytes()
    with Container.open(path) as file:
        used = [(0, 128), (file.end - 1000, file.end)]
        for stored in file.arrays.values():
            used += [
                (block.offset, block.offset + -(-length // 64) * 64) for block, _, length in stored.parts() if block
            ]
    chosen = random.Random(0)
    places = [
        *range(128),
        *range(len(intact) - 60, len(intact)),
        *(chosen.randrange(*chosen.choice(used)) for _ in range(300)),
    ]
    for place in places:
        flipped = bytearray(intact)
        flipped[place] ^= 1 << chosen.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises((CorruptDataError, FileFormatError)):
            read(path)


@pytest.mark.parametrize("saves", [1, 2])
def test_a_file_that_was_cut_off_is_found(saves: int, path: Path) -> None:
    for number in range(saves):
        write(path, {"number": number}, {**SMALL, "noise": NOISE ^ np.uint8(number)})
    intact = path.read_bytes()
    for size in [0, 1, 7, 8, 100, 127, 128, *range(129, len(intact), len(intact) // 20), len(intact) - 1]:
        path.write_bytes(intact[:size])
        with pytest.raises((CorruptDataError, FileFormatError)):
            read(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"\x80\x04\x95 a pickle", b"x" * 5000])
def test_files_of_other_kinds(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match="is not a saved buffer"):
        read(path)


def test_a_newer_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "VERSION", 7)
    write(path, {}, SMALL)
    monkeypatch.undo()
    with pytest.raises(FileFormatError, match=r"format version 7, .* reads up to 1. Update it"):
        read(path)


def test_a_file_cannot_claim_more_than_there_is(path: Path) -> None:
    write(path, {}, {"huge": np.broadcast_to(np.zeros(1), (1,))})
    text = path.read_bytes()
    huge = text[128:].replace(b'"shape":[1],"blocks":[null]', b'"shape":[99999999999],"blocks":[null]')
    header = container.HEADER.pack(container.MAGIC, 1, 0, 1, 128, len(huge), container.xxhash.xxh3_128_digest(huge))
    path.write_bytes(header + container.xxhash.xxh3_128_digest(header) + huge)
    with pytest.raises(CorruptDataError, match="is corrupt"):
        read(path)


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 100, BLOCK_BYTES, 2 * BLOCK_BYTES + 300])
def test_a_full_disk_when_saving_for_the_first_time(room: int, path: Path) -> None:
    with files_no_larger_than(room), pytest.raises(SaveError, match="could not be written: File too large"):
        write(path, {}, {"noise": NOISE})
    assert not list(path.parent.iterdir())
    write(path, {}, {"noise": NOISE})
    assert_holds(path, {}, {"noise": NOISE})


@pytest.mark.parametrize("room", [0, 100, BLOCK_BYTES])
def test_a_full_disk_when_saving_again(room: int, path: Path) -> None:
    write(path, {"n": 1}, {"noise": NOISE})
    before = path.read_bytes()
    with files_no_larger_than(len(before) + room), pytest.raises(SaveError, match="last complete save is still valid"):
        write(path, {"n": 2}, {"noise": ~NOISE})
    assert path.read_bytes() == before
    write(path, {"n": 2}, {"noise": ~NOISE})
    assert_holds(path, {"n": 2}, {"noise": ~NOISE})


@pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("call", range(2))
def test_an_interruption_while_waiting_for_the_disk(
    error: BaseException, call: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, {"number": 0}, {"noise": NOISE, "numbers": NUMBERS})
    calls = iter(range(10))

    def fsync(descriptor: int) -> None:
        if next(calls) == call:
            raise error

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises((SaveError, KeyboardInterrupt)):
        write(path, {"number": 1}, {"noise": NOISE + np.uint8(1), "numbers": NUMBERS + 1})
    monkeypatch.undo()
    assert_is_one_of_them(path)
    write(path, {"number": 2}, {"noise": NOISE + np.uint8(2), "numbers": NUMBERS + 2})
    assert assert_is_one_of_them(path) == 2


def keep_saving(path: Path) -> None:
    for number in range(1, sys.maxsize):
        write(path, {"number": number}, {"noise": (NOISE + np.uint8(number % 256)), "numbers": NUMBERS + number})


def assert_is_one_of_them(path: Path) -> int:
    meta, arrays = read(path)
    number = meta["number"]
    np.testing.assert_array_equal(arrays["numbers"], NUMBERS + number)
    np.testing.assert_array_equal(arrays["noise"], NOISE + np.uint8(number % 256))
    return number


@needs_fork
def test_a_process_killed_at_any_moment_leaves_the_old_or_the_new_state(path: Path) -> None:
    """The child also writes anew every few saves, so that both ways to save are met in all their moments."""
    delays = random.Random(0)
    write(path, {"number": 0}, {"noise": NOISE, "numbers": NUMBERS})
    seen = set()
    kills = 0
    while kills < 50 or (len(seen) <= 3 and kills < 500):  # on a busy machine, few children get as far as saving
        kills += 1
        child = multiprocessing.get_context("fork").Process(target=keep_saving, args=(path,))
        child.start()
        time.sleep(delays.uniform(0.005, 0.06))
        os.kill(child.pid, signal.SIGKILL)  # type: ignore[arg-type]  # it has been started
        child.join()
        seen.add(assert_is_one_of_them(path))
    assert len(seen) > 3


@needs_fork
@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("call", range(4))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_ends_at_an_fsync(exists: bool, call: int, when: str, path: Path) -> None:
    """Where the order of writes matters, whatever reaches the disk before the power fails."""
    if exists:
        write(path, {"number": 0}, {"noise": NOISE, "numbers": NUMBERS})

    def save() -> None:
        calls, fsync = iter(range(10)), os.fsync

        def ending(descriptor: int) -> None:
            number = next(calls)
            if number == call and when == "before":
                os._exit(0)
            fsync(descriptor)
            if number == call:
                os._exit(0)

        os.fsync = ending
        write(path, {"number": 1}, {"noise": NOISE + np.uint8(1), "numbers": NUMBERS + 1})

    child = multiprocessing.get_context("fork").Process(target=save)
    child.start()
    child.join()
    if exists or path.exists():
        assert assert_is_one_of_them(path) in ((0, 1) if exists else (1,))
