"""The command line, called as a user calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "sb3_extra_buffers"]


def run(
    *arguments: object, cwd: Path | None = None, without: tuple[str, ...] = (), encoding: str = "utf-8"
) -> subprocess.CompletedProcess[str]:
    """Run a command, on a machine where the packages of ``without`` are not installed."""
    command = COMMAND
    if without:
        hide = f"import sys; sys.modules.update(dict.fromkeys({without}))"
        command = [sys.executable, "-c", f"{hide}; from sb3_extra_buffers.cli import main; main()"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": encoding},
        capture_output=True,
        encoding=encoding,
        timeout=300,
        check=False,
    )


def error_of(finished: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """The error message, which must be the only thing that was said."""
    assert finished.returncode == code, finished.stderr
    assert finished.stdout == ""
    (line,) = finished.stderr.splitlines()
    assert line.startswith("Error: ")
    return line
