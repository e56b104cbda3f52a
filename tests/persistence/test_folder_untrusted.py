"""Folders that may be untrusted: nothing outside them is written to."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.compressed import CompressedDictReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.errors import CorruptDataError, ExtraBuffersError
from sb3_extra_buffers.persistence.container import Container, write
from tests.persistence.buffers import add, steps_for
from tests.persistence.folders import filled, needs_fork


def link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def hard_link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.hardlink_to(target)


def pipe(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def directory(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


@needs_fork
@pytest.mark.parametrize("replace", [link, hard_link, pipe, directory])
@pytest.mark.parametrize("what", ["state", "observations", "lock", ".state.unfinished"])
def test_nothing_outside_an_untrusted_folder_is_written_to(what: str, replace: Any, tmp_path: Path) -> None:
    filled(tmp_path / "folder").close()
    (path,) = (tmp_path / "folder").glob("*.arena") if what == "observations" else [tmp_path / "folder" / what]
    precious = tmp_path / "precious"
    precious.write_bytes(path.read_bytes() if what in ("state", "observations") else b"precious")
    before = precious.read_bytes()
    replace(path, precious)
    with contextlib.suppress(ExtraBuffersError, OSError):
        with CompressedReplayBuffer.load(tmp_path / "folder", "cpu") as buffer:
            for number, step in enumerate(steps_for(buffer, 90)):
                add(buffer, step, number)
                buffer.flush()
        assert what in ("lock", ".state.unfinished")  # which nothing is written to, or is replaced
    gc.collect()
    assert precious.read_bytes() == before


@pytest.mark.parametrize(
    "name",
    [
        "state",
        "lock",
        "../precious.00000000.arena",
        "/etc/passwd",
        "..",
        "",
        "x.arena",
        "observations/.12345678.arena",
        7,
    ],
)
def test_an_arena_is_a_file_of_the_folder_and_of_no_other_use(name: Any, tmp_path: Path) -> None:
    filled(tmp_path / "folder").close()
    (tmp_path / "precious.00000000.arena").write_bytes(bytes(1 << 20))
    state = tmp_path / "folder" / "state"
    with Container.open(state) as file:
        meta, arrays = file.meta, {key: file.read(key) for key in file.arrays}
    meta["state"]["stores"][""]["frames"]["arena"]["file"] = name
    write(state, meta, arrays)
    with pytest.raises(CorruptDataError, match="arena"):
        BaseCompressedBuffer.load(tmp_path / "folder", "cpu")


def test_two_stores_cannot_have_one_file(tmp_path: Path) -> None:
    image, actions = spaces.Box(0, 255, (1, 24, 24), np.uint8), spaces.Discrete(2)
    buffer = CompressedDictReplayBuffer(
        50, spaces.Dict({"left": image, "right": image}), actions, "cpu", storage="mmap", path=tmp_path
    )
    for number in range(40):  # the same in both, so that only the name of the file is wrong
        pair = [{key: np.full((1, 1, 24, 24), number + i, np.uint8) for key in ("left", "right")} for i in (0, 1)]
        buffer.add(*pair, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
    buffer.close()
    with Container.open(tmp_path / "state") as file:
        meta, arrays = file.meta, {key: file.read(key) for key in file.arrays}
    stores = meta["state"]["stores"]
    one, other = stores
    stores[one]["frames"]["arena"]["file"] = stores[other]["frames"]["arena"]["file"]
    write(tmp_path / "state", meta, arrays)
    with pytest.raises(CorruptDataError, match="several stores are in the same file"):
        BaseCompressedBuffer.load(tmp_path, "cpu")
