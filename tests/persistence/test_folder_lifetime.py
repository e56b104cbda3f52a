"""Whose a folder is, from when to when, and what is in it when its process has ended."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError, ExtraBuffersError, SaveError
from sb3_extra_buffers.persistence.container import Container, write
from sb3_extra_buffers.training_utils.checkpoints import CheckpointBufferCallback
from tests.persistence.buffers import add, draw, make, steps_for
from tests.transitions import assert_same

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def on_disk(path: Path, name: str = "CompressedReplayBuffer", **kwargs: Any) -> Any:
    return make(name, **{"storage": "mmap", "path": path, "compression_method": "rle", **kwargs})


def filled(path: Path, steps: int = 20, **kwargs: Any) -> Any:
    buffer = on_disk(path, **kwargs)
    for number, step in enumerate(steps_for(buffer, steps)):
        add(buffer, step, number)
    return buffer


def names(path: Path) -> list[str]:
    return sorted(entry.name.split(".")[0] for entry in path.iterdir())


# How a process ends

ENDINGS = {
    "normally": "",
    "by an exception": "raise ValueError",
    "by sys.exit": "sys.exit(3)",
    "by Ctrl-C": "signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), signal.SIGINT)",
    "without the buffer": "del buffer; gc.collect(); os._exit(0)",
    "without the buffer, in a cycle": "cycle = [buffer]; cycle.append(cycle); del buffer, cycle",
    "after a child did": "child = os.fork(); child or sys.exit(); os.waitpid(child, 0)",
    "after a child did, by multiprocessing": "run(print)",
    "with the buffer in a child": "buffer.close(); run(fill)",
    "while a thread waits": "threading.Thread(target=lambda: time.sleep(0.2)).start()",
    "with a broken folder beside": "other = fill(path + '-2'); shutil.rmtree(path + '-2')",
}
SCRIPT = """
import gc, multiprocessing, os, shutil, signal, sys, threading, time
from pathlib import Path
from tests.persistence.test_folder_lifetime import ENDINGS, filled, on_disk

def fill(folder=None):
    return filled(Path(folder or path), 20)

def run(work):
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start(), child.join()

# Each ending in a fork of this process, so that all is imported only once.
children = []
for number, (ending, how) in enumerate(ENDINGS.items()):
    children.append(os.fork())
    if children[-1] == 0:
        children = []
        path = os.path.join(sys.argv[1], str(number))
        buffer = on_disk(Path(path)) if ending == "with the buffer in a child" else fill()
        exec(how)
        break
for child in children:
    os.waitpid(child, 0)
"""


@needs_fork
def test_nothing_is_lost_however_a_process_ends(tmp_path: Path) -> None:
    """None of them calls ``close()``."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL, timeout=120, check=True)
    expected = filled(tmp_path / "expected")
    for number, ending in enumerate(ENDINGS):
        loaded = CompressedReplayBuffer.load(tmp_path / str(number), "cpu")
        assert loaded.size() == 20, ending
        assert_same(draw(loaded, 0), draw(expected, 0))
        assert names(tmp_path / str(number)) == ["lock", "observations", "state"]


def test_a_buffer_that_nobody_has_any_more_is_flushed(tmp_path: Path) -> None:
    buffer = filled(tmp_path)
    batch = draw(buffer, 0)
    del buffer
    gc.collect()
    assert_same(draw(CompressedReplayBuffer.load(tmp_path, "cpu"), 0), batch)


def test_a_buffer_whose_folder_was_removed_goes_without_an_error(tmp_path: Path) -> None:
    buffer = filled(tmp_path / "folder")
    shutil.rmtree(tmp_path / "folder")
    with pytest.raises(SaveError, match="could not be written"):
        buffer.close()
    del buffer
    gc.collect()
    assert not (tmp_path / "folder").exists()


@needs_fork
def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    """Also where it was killed before its first flush."""

    def fill_and_die() -> None:
        kept = filled(tmp_path)
        assert kept.size()
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(3):
        child = multiprocessing.get_context("fork").Process(target=fill_and_die)
        child.start()
        child.join()
    assert len(list(tmp_path.glob("*.arena"))) == 1
    (tmp_path / "somebody's.arena").touch()
    buffer = on_disk(tmp_path)
    assert buffer.size() == 0
    assert names(tmp_path) == ["lock", "observations", "somebody's"]
    buffer.close()


# Folders that cannot be used: SB3's load() makes a buffer all the same


def model_on_disk(folder: Path, n_envs: int = 1) -> DQN:
    return DQN(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs),
        buffer_size=500,
        replay_buffer_class=CompressedReplayBuffer,
        replay_buffer_kwargs={"storage": "mmap", "path": folder / "buffer"},
        learning_starts=10,
        device="cpu",
    )


def test_a_model_can_be_loaded_while_the_one_that_was_trained_lives(tmp_path: Path) -> None:
    model = model_on_disk(tmp_path)
    model.learn(50)
    model.save(tmp_path / "model")
    loaded = DQN.load(tmp_path / "model", env=make_vec_env("CartPole-v1"), device="cpu")
    loaded.predict(np.zeros((1, 4), np.float32))
    assert loaded.replay_buffer.size() == 0
    with pytest.raises(
        ConfigurationError, match=r"in use by another buffer, of this process or another one\. Close that buffer"
    ):
        loaded.learn(50)
    model.learn(30, reset_num_timesteps=False)
    size = model.replay_buffer.size()
    assert size >= 80
    model.replay_buffer.close()
    again = DQN.load(tmp_path / "model", env=make_vec_env("CartPole-v1"), device="cpu")
    assert again.replay_buffer.size() == size
    again.learn(20, reset_num_timesteps=False)


def test_a_model_can_be_evaluated_in_another_number_of_environments(tmp_path: Path) -> None:
    model = model_on_disk(tmp_path, n_envs=4)
    model.learn(80)
    model.save(tmp_path / "model")
    model.replay_buffer.close()
    files = sorted(entry.name for entry in (tmp_path / "buffer").iterdir())
    loaded = DQN.load(tmp_path / "model", env=make_vec_env("CartPole-v1", 1), device="cpu")
    with pytest.raises(ConfigurationError, match="made with other arguments: n_envs"):
        loaded.learn(50)
    assert files == sorted(entry.name for entry in (tmp_path / "buffer").iterdir())
    assert CompressedReplayBuffer.load(tmp_path / "buffer").size() == 20
    del loaded
    gc.collect()
    assert CompressedReplayBuffer.load(tmp_path / "buffer").size() == 20


def test_a_model_can_be_loaded_where_its_folder_cannot_be(tmp_path: Path) -> None:
    """On another machine, say."""
    model = model_on_disk(tmp_path)
    model.save(tmp_path / "model")
    model.replay_buffer.close()
    for entry in (tmp_path / "buffer").iterdir():
        entry.unlink()
    (tmp_path / "buffer").rmdir()
    (tmp_path / "buffer").touch()
    loaded = DQN.load(tmp_path / "model", env=make_vec_env("CartPole-v1"), device="cpu")
    with pytest.raises(ConfigurationError, match="buffer cannot be used: File exists"):
        loaded.learn(20)


USES = {
    "add": lambda buffer, path: buffer.add(*steps_for(buffer, 1)[0]),
    "sample": lambda buffer, path: buffer.sample(1),
    "flush": lambda buffer, path: buffer.flush(),
    "save": lambda buffer, path: buffer.save(path / "file"),
    "pickle": lambda buffer, path: pickle.dumps(buffer),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "name",
    ["CompressedReplayBuffer", "CompressedPrioritizedReplayBuffer", "CompressedHerReplayBuffer"],
)
def test_a_detached_buffer_says_why_it_cannot_be_used(name: str, use: str, tmp_path: Path) -> None:
    owner = filled(tmp_path / "folder", name=name)
    owner.flush()
    files = sorted((entry.name, entry.stat().st_size) for entry in (tmp_path / "folder").iterdir())
    detached = on_disk(tmp_path / "folder", name=name)
    with pytest.raises(ConfigurationError, match="in use by another buffer"):
        USES[use](detached, tmp_path)
    assert detached.size() == 0
    assert not (tmp_path / "file").exists()
    detached.close()
    assert files == sorted((entry.name, entry.stat().st_size) for entry in (tmp_path / "folder").iterdir())
    with pytest.raises(ConfigurationError, match="in use by another buffer"):
        type(owner).load(tmp_path / "folder")
    owner.close()


def test_a_checkpoint_of_a_detached_buffer_is_refused(tmp_path: Path) -> None:
    model = model_on_disk(tmp_path)
    model.learn(50, callback=CheckpointBufferCallback(50, tmp_path / "checkpoints"))
    other = model_on_disk(tmp_path)
    callback = CheckpointBufferCallback(50, tmp_path / "checkpoints")
    callback.init_callback(other)
    with pytest.raises(ConfigurationError, match="in use"):
        callback.save()
    resumed = CheckpointBufferCallback.resume(DQN, tmp_path / "checkpoints", device="cpu")
    assert resumed is not None
    assert resumed.replay_buffer.size() == model.replay_buffer.size()


def test_a_buffer_that_could_not_be_opened_overwrites_nothing(tmp_path: Path) -> None:
    filled(tmp_path).close()
    state = (tmp_path / "state").read_bytes()
    (tmp_path / "state").write_bytes(state[:-1])
    with pytest.raises(CorruptDataError):
        on_disk(tmp_path)
    gc.collect()
    assert (tmp_path / "state").read_bytes() == state[:-1]
    (tmp_path / "state").write_bytes(state)
    assert on_disk(tmp_path).size() == 20  # neither is the folder still locked


# One owner


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
            os._exit(7 if "of which this one is a fork" in str(error) else 1)
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


# Folders from strangers


def link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def hard_link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.hardlink_to(target)


def pipe(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def directory(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


@needs_fork
@pytest.mark.parametrize("replace", [link, hard_link, pipe, directory])
@pytest.mark.parametrize("what", ["state", "observations", "lock", ".state.unfinished"])
def test_nothing_outside_a_strangers_folder_is_written_to(what: str, replace: Any, tmp_path: Path) -> None:
    filled(tmp_path / "folder").close()
    (path,) = (tmp_path / "folder").glob("*.arena") if what == "observations" else [tmp_path / "folder" / what]
    precious = tmp_path / "precious"
    precious.write_bytes(path.read_bytes() if what in ("state", "observations") else b"precious")
    before = precious.read_bytes()
    replace(path, precious)
    with contextlib.suppress(ExtraBuffersError, OSError):
        with CompressedReplayBuffer.load(tmp_path / "folder", "cpu") as buffer:
            for number, step in enumerate(steps_for(buffer, 90)):
                add(buffer, step, number)
                buffer.flush()
        assert what in ("lock", ".state.unfinished")  # which nothing is written to, or is replaced
    gc.collect()
    assert precious.read_bytes() == before


@pytest.mark.parametrize(
    "name",
    [
        "state",
        "lock",
        "../precious.00000000.arena",
        "/etc/passwd",
        "..",
        "",
        "x.arena",
        "observations/.12345678.arena",
        7,
    ],
)
def test_an_arena_is_a_file_of_the_folder_and_of_no_other_use(name: Any, tmp_path: Path) -> None:
    filled(tmp_path / "folder").close()
    (tmp_path / "precious.00000000.arena").write_bytes(bytes(1 << 20))
    state = tmp_path / "folder" / "state"
    with Container.open(state) as file:
        meta, arrays = file.meta, {key: file.read(key) for key in file.arrays}
    meta["state"]["stores"][""]["frames"]["arena"]["file"] = name
    write(state, meta, arrays)
    with pytest.raises(CorruptDataError, match="arena"):
        BaseCompressedBuffer.load(tmp_path / "folder", "cpu")


def test_two_stores_cannot_have_one_file(tmp_path: Path) -> None:
    filled(tmp_path, name="CompressedDictReplayBuffer").close()
    with Container.open(tmp_path / "state") as file:
        meta, arrays = file.meta, {key: file.read(key) for key in file.arrays}
    stores = meta["state"]["stores"]
    one, other = stores
    stores[one]["frames"]["arena"]["file"] = stores[other]["frames"]["arena"]["file"]
    write(tmp_path / "state", meta, arrays)
    with pytest.raises(CorruptDataError, match="several stores are in the same file"):
        BaseCompressedBuffer.load(tmp_path, "cpu")
