"""Ctrl-C, an error, a full disk: at every step of saving, flushing and checkpointing."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from stable_baselines3 import DQN
from tqdm import tqdm

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.errors import SaveError
from sb3_extra_buffers.training_utils.checkpoints import CheckpointBufferCallback
from tests.persistence.buffers import SLOTS, add, draw, make, steps_for
from tests.persistence.test_container import files_no_larger_than
from tests.transitions import assert_same

# A file that was opened, but not yet given to who closes it, when the interruption came.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

_PACKAGE = str(Path(sys.modules["sb3_extra_buffers"].__file__ or "").parent)
_TRIALS = 60
ARGUMENTS = {"compression_method": "delta", "frame_stack": 4}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class _Steps:
    """Counts the lines of this library that are executed, and raises an error at one of them."""

    def __init__(self, at: int | None = None, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.error, self.count = at, error, 0

    def __enter__(self) -> _Steps:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                raise self.error("interrupted")
        return self._trace


def moments(action: Callable[[], object]) -> list[int]:
    """Steps of ``action``, which is done once: all of them, or some that lie apart."""
    with _Steps() as steps:
        action()
    assert steps.count > 20
    return sorted({round(number) for number in np.linspace(1, steps.count, _TRIALS)})


def filled(steps: list[Any], **more: Any) -> Any:
    buffer = make("CompressedReplayBuffer", **ARGUMENTS, **more)
    for number, step in enumerate(steps):
        add(buffer, step, number)
    return buffer


@pytest.fixture(scope="module")
def transitions() -> list[Any]:
    return steps_for(make("CompressedReplayBuffer"), 4 * SLOTS)


@contextlib.contextmanager
def interrupted(at: int, error: type[BaseException]) -> Iterator[None]:
    with contextlib.suppress(error, SaveError), _Steps(at, error):
        yield


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
@pytest.mark.parametrize("exists", [False, True])
def test_save(error: type[BaseException], exists: bool, transitions: list[Any], tmp_path: Path) -> None:
    buffer, path = filled(transitions[:SLOTS]), tmp_path / "buffer"
    before = draw(buffer, 0)
    buffer.save(tmp_path / "old")
    for number, step in enumerate(transitions[SLOTS : SLOTS + 30]):
        add(buffer, step, number)
    after = draw(buffer, 0)
    buffer.save(tmp_path / "new")

    def prepare() -> None:
        path.unlink(missing_ok=True)
        if exists:
            shutil.copy(tmp_path / "old", path)

    prepare()
    for at in moments(lambda: buffer.save(path)):
        prepare()
        with interrupted(at, error):
            buffer.save(path)
        if exists or path.exists():
            found = draw(CompressedReplayBuffer.load(path, "cpu"), 0)
            assert_same(found, after if is_same(found, after) or not exists else before)
        buffer.save(path)
        assert_same(draw(CompressedReplayBuffer.load(path, "cpu"), 0), after)
        assert_same(draw(buffer, 0), after)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["buffer", "new", "old"]


def is_same(one: Any, other: Any) -> bool:
    try:
        assert_same(one, other)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_flush(error: type[BaseException], transitions: list[Any], tmp_path: Path) -> None:
    """One buffer goes on and on: after an interruption it adds and flushes as if nothing had been."""
    buffer, plain = filled([], storage="mmap", path=tmp_path / "folder"), filled([])
    number = 0

    def go_on(count: int) -> None:
        nonlocal number
        for _ in range(count):
            for one in (buffer, plain):
                add(one, transitions[number % len(transitions)], number)
            number += 1

    go_on(SLOTS + 5)
    for at in moments(buffer.flush):
        before = draw(plain, 0)
        buffer.flush()
        go_on(7)
        after = draw(plain, 0)
        with interrupted(at, error):
            buffer.flush()
        # As it would be found if the process had ended here.
        shutil.copytree(tmp_path / "folder", tmp_path / "copy")
        with CompressedReplayBuffer.load(tmp_path / "copy", "cpu") as copy:
            found = draw(copy, 0)
            assert_same(found, after if is_same(found, after) else before)
        shutil.rmtree(tmp_path / "copy")
        assert_same(draw(buffer, 0), after)
        # Bytes that either state refers to are not used again before the next flush.
        go_on(2)
        shutil.copytree(tmp_path / "folder", tmp_path / "copy")
        with CompressedReplayBuffer.load(tmp_path / "copy", "cpu") as copy:
            assert_same(draw(copy, 0), found)
        shutil.rmtree(tmp_path / "copy")
    buffer.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_opening_a_folder(error: type[BaseException], transitions: list[Any], tmp_path: Path) -> None:
    with filled(transitions[: SLOTS + 5], storage="mmap", path=tmp_path / "folder") as buffer:
        expected = draw(buffer, 0)
    opened: list[Any] = []
    for at in moments(lambda: opened.append(CompressedReplayBuffer.load(tmp_path / "folder", "cpu")))[::3]:
        opened.clear()
        with interrupted(at, error):
            opened.append(CompressedReplayBuffer.load(tmp_path / "folder", "cpu"))
        opened.clear()
        gc.collect()
        with CompressedReplayBuffer.load(tmp_path / "folder", "cpu") as buffer:
            assert_same(draw(buffer, 0), expected)
        assert len(list((tmp_path / "folder").iterdir())) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_checkpoint(error: type[BaseException], tmp_path: Path) -> None:
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        buffer_size=200,
        replay_buffer_class=CompressedReplayBuffer,
        policy_kwargs={"net_arch": [4]},
        device="cpu",
    )
    callback = CheckpointBufferCallback(10**9, tmp_path)
    callback.init_callback(model)

    def save() -> None:
        # The first reward tells which checkpoint it is.
        model.num_timesteps = callback.num_timesteps = model.num_timesteps + 1
        model.replay_buffer.add(*[np.ones((1, 4))] * 2, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
        model.replay_buffer.rewards[0] = model.num_timesteps
        callback.save()

    save()
    for at in moments(save)[::3]:
        before = model.num_timesteps
        with interrupted(at, error):
            save()
        resumed = CheckpointBufferCallback.resume(DQN, tmp_path, device="cpu")
        assert resumed is not None
        assert resumed.num_timesteps in (before, before + 1)
        assert resumed.replay_buffer.rewards[0, 0] == resumed.num_timesteps
        save()
        assert CheckpointBufferCallback.resume(DQN, tmp_path, device="cpu").num_timesteps == model.num_timesteps


@pytest.mark.parametrize("room", [0, 5_000, 20_000, 70_000, 200_000])
def test_a_full_disk_while_flushing(room: int, transitions: list[Any], tmp_path: Path) -> None:
    buffer = filled(transitions[:30], storage="mmap", path=tmp_path / "folder")
    before = draw(buffer, 0)
    buffer.flush()
    with contextlib.suppress(SaveError), files_no_larger_than(room):
        for number, step in enumerate(transitions[30 : SLOTS + 60]):
            add(buffer, step, number)
        buffer.flush()
    shutil.copytree(tmp_path / "folder", tmp_path / "copy")
    loaded: Any = BaseCompressedBuffer.load(tmp_path / "copy", "cpu")
    assert loaded.size() in (30, buffer.size())
    if loaded.size() == 30:
        assert_same(draw(loaded, 0), before)
    after = draw(buffer, 0)
    buffer.close()
    assert_same(draw(CompressedReplayBuffer.load(tmp_path / "folder", "cpu"), 0), after)


def test_a_lock_that_a_killed_process_kept_is_not_waited_for(transitions: list[Any], tmp_path: Path) -> None:
    """tqdm's is shared by all forks, and one that is killed while it holds the lock never gives it back."""
    buffer, lock = filled(transitions[:20]), tqdm.get_lock()

    def save_and_load() -> None:
        buffer.save(tmp_path / "buffer")
        CompressedReplayBuffer.load(tmp_path / "buffer", "cpu")

    with lock:
        thread = threading.Thread(target=save_and_load, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
