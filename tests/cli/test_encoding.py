"""Output that is redirected where the encoding has no letters for it, as to a file on Windows."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.cli import app
from sb3_extra_buffers.compressed import CompressedDictReplayBuffer
from tests.cli.commands import run_program
from tests.transitions import play

SPACE = spaces.Dict({"ж": spaces.Box(0, 255, (4, 8, 9), np.uint8)})
"""A key that Windows' encoding for Western Europe does not have."""
COMMANDS = {
    "bench": ("--env", "CartPole-v1", "--steps", 40, "--repeats", 1, "--methods", "none", "--json", "r.json"),
    "estimate": ("--env", "CartPole-v1", "--steps", 40),
    "verify": ("--env", "CartPole-v1", "--steps", 40),
    "methods": (),
    "inspect": ("buffer",),
}


def test_no_command_is_left_out() -> None:
    have_a_file_of_their_own = {"demo", "cluster-demo", "zoo"}
    assert COMMANDS.keys() | have_a_file_of_their_own == app.commands.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_gets_to_its_end(command: str, tmp_path: Path) -> None:
    if command == "inspect":
        buffer = CompressedDictReplayBuffer(40, SPACE, spaces.Discrete(3), "cpu")
        for transition in islice(play(SPACE, 1), 20):
            buffer.add(*transition)
        buffer.save(tmp_path / "buffer")
    finished = run_program(command, *COMMANDS[command], cwd=tmp_path, encoding="cp1252")
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    assert len(finished.stdout.splitlines()) > 1
    if command == "bench":
        assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["results"]


def test_an_error_with_other_letters_is_still_told(tmp_path: Path) -> None:
    finished = run_program("inspect", "жук", cwd=tmp_path, encoding="cp1252")
    assert finished.returncode == 2
    assert finished.stderr.startswith("Error: ")


@pytest.mark.skipif(os.name == "nt", reason="has no sh")
def test_a_command_needs_no_standard_error(tmp_path: Path) -> None:
    command = shlex.join([sys.executable, "-m", "sb3_extra_buffers", "verify", "--env", "CartPole-v1", "--steps", "40"])
    done = subprocess.run(["sh", "-c", f"{command} 2>&-"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, "all identical" in done.stdout) == (0, True), done.stdout
