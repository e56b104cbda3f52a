"""Ctrl-C waits where several things must change together."""

from __future__ import annotations

import signal
import threading

import pytest

from sb3_extra_buffers.interruption import uninterrupted


def interrupt_inside(done: list[str]) -> None:
    with uninterrupted():
        done.append("begun")
        signal.raise_signal(signal.SIGINT)
        done.append("finished")


def test_the_block_is_finished_first() -> None:
    done: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupt_inside(done)
    assert done == ["begun", "finished"]
    assert signal.getsignal(signal.SIGINT) is before


def test_blocks_in_blocks() -> None:
    done: list[str] = []

    def both() -> None:
        with uninterrupted():
            interrupt_inside(done)
            done.append("and the outer one")

    with pytest.raises(KeyboardInterrupt):
        both()
    assert done == ["begun", "finished", "and the outer one"]


def test_an_error_goes_first() -> None:
    with pytest.raises(ValueError, match="mine"), uninterrupted():
        raise ValueError("mine")


def test_other_threads_have_nothing_to_wait_for() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
