"""A few of the kills of :mod:`tests.soak.kill`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_killed_processes_leave_is_exact() -> None:
    """In a process of its own: it forks, and threads that other tests have started do not survive that."""
    command = [sys.executable, "-m", "tests.soak.kill", "--kills", "18", "--seed", "5"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "18 kills" in done.stdout
