from __future__ import annotations

import subprocess

from sb3_extra_buffers.codecs.registry import METHODS
from tests.cli.commands import COMMAND, run, run_program


def test_every_method_is_listed_with_its_levels() -> None:
    rows = {line.split()[0]: line for line in run("methods").stdout.split("\n\n")[0].splitlines()[2:]}
    assert set(rows) == set(METHODS)
    assert "-100..-1 and 1..22" in rows["zstd"]
    assert rows["zstd-dict"].endswith(" frames_per_record")
    assert rows["none"].split() == ["none", "yes", "-", "-"]


def test_what_is_missing_comes_with_the_command_that_installs_it() -> None:
    printed = run_program("methods", without=("zstandard", "numba")).stdout
    assert [line.split()[:2] for line in printed.splitlines() if line.startswith("zstd ")] == [["zstd", "no"]]
    assert '"zstd" needs a package that is not installed: pip install "sb3-extra-buffers[zstd]"' in printed
    assert '"delta" is many times faster with numba: pip install "sb3-extra-buffers[numba]"' in printed


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen([*COMMAND, "methods"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # before anything was printed
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 1
