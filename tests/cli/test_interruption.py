"""Ctrl-C, and a parent that dies: nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.cli.commands import COMMAND

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


@contextmanager
def measuring(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A bench that has begun to measure, and the processes that it has started. Temporary files go to ``folder``."""
    process = subprocess.Popen(
        [*COMMAND, "bench", "--env", "CartPole-v1", "--steps", "50", "--methods", ",".join(["none"] * 50)],
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal gives one to each command
        # Where the tests run in the background, Ctrl-C is ignored, and so it would be by what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stderr is not None
        said = ""
        while "memory:" not in said:
            letter = process.stderr.read(1)
            assert letter, said  # it has ended
            said += letter
        parent = psutil.Process(process.pid)
        while not (children := parent.children(recursive=True)):
            time.sleep(0.02)
        yield process, children
    finally:
        process.kill()
        process.communicate()


def gone(processes: list[psutil.Process]) -> bool:
    """Whether they have ended; one that ends waits as a zombie until its adoptive parent looks."""
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


def wait_until_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 30
    while not gone(processes):
        assert time.monotonic() < deadline, processes
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_command_ends_quietly(number: signal.Signals, tmp_path: Path) -> None:
    with measuring(tmp_path) as (process, children):
        os.killpg(process.pid, number)
        printed, said = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert printed == ""
        assert "Traceback" not in said
        assert "Warning" not in said
        wait_until_gone(children)
        assert list(tmp_path.iterdir()) == []


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with measuring(tmp_path) as (process, children):
        process.kill()
        wait_until_gone(children)
