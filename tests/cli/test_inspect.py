from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from tests.cli.commands import error_of, run
from tests.transitions import play

SPACE = spaces.Box(0, 255, (4, 30, 40), np.uint8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspect") / "buffer"
    buffer = CompressedReplayBuffer(400, SPACE, spaces.Discrete(5), "cpu", n_envs=2)
    for transition in islice(play(SPACE, 2), 120):
        buffer.add(*transition)
    buffer.save(path)
    return path


def test_a_saved_buffer_is_described(saved: Path) -> None:
    printed = run("inspect", saved).stdout
    assert "CompressedReplayBuffer" in printed
    assert "240 of 400, from 2 environments" in printed
    assert "checksums       all right" in printed


def test_damage_is_named_and_is_an_error(saved: Path, tmp_path: Path) -> None:
    damaged = bytearray(saved.read_bytes())
    damaged[300] ^= 1
    path = tmp_path / "damaged"
    path.write_bytes(damaged)
    result = run("inspect", path)
    assert result.returncode == 1
    assert "WRONG" in result.stdout
    assert "not compared" in run("inspect", path, "--no-checksums").stdout


def test_a_folder_that_is_no_buffer_is_refused_in_one_line(tmp_path: Path) -> None:
    assert "is not the folder of a buffer on disk" in error_of(run("inspect", tmp_path))


def test_another_file_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear reader" * 40)
    assert "is not a saved buffer" in error_of(run("inspect", path))
