"""Some of the files of :mod:`tests.soak.fuzz`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and /proc")
def test_changed_files_are_refused_or_can_be_read() -> None:
    """In a process of its own: it forks, and threads that other tests have started do not survive that."""
    command = [sys.executable, "-m", "tests.soak.fuzz", "--mutations", "40", "--seed", "3"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("refused") > 10
