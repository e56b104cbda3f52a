from __future__ import annotations

import os
import signal
import sys

import pytest

from sb3_extra_buffers.errors import MissingPackageError, WorkerError
from sb3_extra_buffers.measure.processes import run_in_fresh_process


class TwoArgumentsError(Exception):
    """Cannot be unpickled from its message alone."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def process_number() -> int:
    return os.getpid()


def fail(kind: str) -> None:
    if kind == "missing":
        raise MissingPackageError("A thing", "package", "extra")
    if kind == "unpicklable":
        raise TwoArgumentsError(1, 2)
    os.kill(os.getpid(), signal.SIGKILL)


def test_it_is_another_process() -> None:
    assert run_in_fresh_process(process_number) != os.getpid()


def test_errors_arrive_with_where_they_came_from() -> None:
    with pytest.raises(MissingPackageError, match=r"sb3-extra-buffers\[extra\]") as caught:
        run_in_fresh_process(fail, "missing")
    assert "in fail" in str(caught.value.__cause__)
    with pytest.raises(WorkerError, match="TwoArgumentsError: 1 and 2"):
        run_in_fresh_process(fail, "unpicklable")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_killed_process_is_explained() -> None:
    with pytest.raises(WorkerError, match="memory ran out"):
        run_in_fresh_process(fail, "killed")
