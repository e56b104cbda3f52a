"""Threads, forked workers and torch get along with buffers: the right results, no deadlock, no crash.

Each case runs in a process of its own, because a deadlock or a crash must fail one test, not end all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.methods import installed

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.mark.parametrize(
    ("case", "methods"),
    [("threads", installed("zstd", "zstd-dict", "delta")), ("fork", ["delta"]), ("training", ["auto"])],
    ids=["threads that sample", "workers that are forked", "training beside sampling"],
)
def test_right_results_without_deadlock(case: str, methods: list[str]) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.compressed.concurrency_probe"]
    finished = subprocess.run(
        [*command, case, *methods],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "done"
