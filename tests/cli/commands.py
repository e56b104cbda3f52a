"""The command line, called as a user calls it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch as th

from sb3_extra_buffers.cli import main

COMMAND = [sys.executable, "-m", "sb3_extra_buffers"]
ENVIRONMENT = {"COLUMNS": "100", "OMP_NUM_THREADS": "1"}
TIMEOUT = 300


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, forked from one that has imported SB3 already, which takes seconds."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return run_program(*arguments, cwd=cwd)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stable_baselines3", __name__])
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder, "stdout"), Path(folder, "stderr")
        process = context.Process(target=_run_forked, args=(list(map(str, arguments)), cwd, texts))
        process.start()
        process.join(TIMEOUT)
        assert process.exitcode is not None, "the command does not end"
        stdout, stderr = (text.read_text(encoding="utf-8") for text in texts)
    return subprocess.CompletedProcess(arguments, process.exitcode, stdout, stderr)


def _run_forked(arguments: list[str], cwd: Path | None, texts: tuple[Path, Path]) -> None:
    for number, text in enumerate(texts, 1):
        os.dup2(os.open(text, os.O_CREAT | os.O_WRONLY), number)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
    os.environ.update(ENVIRONMENT)
    th.set_num_threads(1)
    if cwd is not None:
        os.chdir(cwd)
    main(arguments)


def run_program(
    *arguments: object, cwd: Path | None = None, without: tuple[str, ...] = (), encoding: str = "utf-8"
) -> subprocess.CompletedProcess[str]:
    """Run a command as a new program, on a machine where the packages of ``without`` are not installed."""
    command = COMMAND
    if without:
        hide = f"import sys; sys.modules.update(dict.fromkeys({without}))"
        command = [sys.executable, "-c", f"{hide}; from sb3_extra_buffers.cli import main; main()"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | ENVIRONMENT | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        encoding=encoding,
        timeout=TIMEOUT,
        check=False,
    )


def error_of(finished: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """The error message, which must be the only thing that was said."""
    assert finished.returncode == code, finished.stderr
    assert finished.stdout == ""
    (line,) = finished.stderr.splitlines()
    assert line.startswith("Error: ")
    return line
