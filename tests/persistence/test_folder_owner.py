"""A folder belongs to one buffer of one process at a time."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError
from tests.persistence.buffers import add, draw, steps_for
from tests.persistence.folders import USES, filled, needs_fork, on_disk
from tests.transitions import assert_same


def test_a_closed_buffer_does_not_read_what_another_has_written(tmp_path: Path) -> None:
    first = filled(tmp_path)
    batch = draw(first, 0)
    first.close()
    with on_disk(tmp_path) as second:
        for number, step in enumerate(steps_for(second, 90)):
            add(second, step, number)
            if number < 5:
                assert_same(draw(first, 0), batch)
        second.flush()
        with pytest.raises(ConfigurationError, match="is closed, and its folder has changed since"):
            first.sample(1)


def test_it_can_be_closed_in_another_thread(tmp_path: Path) -> None:
    for _ in range(3):
        thread = threading.Thread(target=filled(tmp_path).close)
        thread.start()
        thread.join()


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    buffer = on_disk(Path("folder"), compression_method="none", frame_stack=None)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for number, step in enumerate(steps_for(buffer, 70)):
        add(buffer, step, number)
    buffer.close()
    assert CompressedReplayBuffer.load(tmp_path / "folder").size() == 40
    assert not list((tmp_path / "elsewhere").iterdir())


def in_a_fork(work: Any) -> int:
    """Run in a forked process, and return its exit status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except ConfigurationError as error:
            os._exit(7 if "this process is a fork of it" in str(error) else 1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_fork
@pytest.mark.parametrize("use", USES)
def test_a_forked_process_cannot_use_it(use: str, tmp_path: Path) -> None:
    buffer = filled(tmp_path)
    buffer.flush()
    assert in_a_fork(lambda: USES[use](buffer, tmp_path)) == 7
    assert in_a_fork(buffer.close) == 0
    with pytest.raises(ConfigurationError, match="in use"):
        CompressedReplayBuffer.load(tmp_path)
    buffer.add(*steps_for(buffer, 1)[0])
    buffer.close()


@needs_fork
@pytest.mark.parametrize("killed", [False, True])
def test_a_forked_process_does_not_keep_the_folder(killed: bool, tmp_path: Path) -> None:
    """Neither after the owner closed it, nor after the owner was killed."""
    read, ready = os.pipe()
    owner = os.fork()
    if owner == 0:
        buffer = filled(tmp_path)
        buffer.flush()
        worker = os.fork()
        if worker == 0:
            signal.pause()
        os.write(ready, worker.to_bytes(8, "little"))
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        buffer.close()
        os._exit(0)
    worker = int.from_bytes(os.read(read, 8), "little")
    try:
        os.waitpid(owner, 0)
        with CompressedReplayBuffer.load(tmp_path, "cpu") as buffer:
            assert buffer.size() == 20
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(read)
        os.close(ready)


@needs_fork
def test_a_forked_process_may_open_it_once_it_is_closed(tmp_path: Path) -> None:
    buffer = filled(tmp_path)
    buffer.close()

    def work() -> None:
        with CompressedReplayBuffer.load(tmp_path, "cpu") as own:
            own.add(*steps_for(own, 1)[0])

    assert in_a_fork(work) == 0
    assert CompressedReplayBuffer.load(tmp_path, "cpu").size() == 21
