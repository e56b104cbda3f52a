"""What is in the folder of a buffer on disk after its process or its buffer has ended."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.errors import SaveError
from tests.persistence.buffers import draw
from tests.persistence.folders import filled, names, needs_fork, on_disk
from tests.transitions import assert_same

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
from tests.persistence.folders import filled, on_disk
from tests.persistence.test_folder_process_end import ENDINGS

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


def test_a_garbage_collected_buffer_is_flushed(tmp_path: Path) -> None:
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


@needs_fork  # elsewhere, a folder that is in use cannot be removed
def test_a_buffer_whose_folder_was_made_anew_leaves_it_to_the_new_buffer(tmp_path: Path) -> None:
    """As in a notebook, where the old buffer goes only once the new one is there."""
    buffer = filled(tmp_path / "folder", steps=5)
    shutil.rmtree(tmp_path / "folder")
    old, buffer = buffer, filled(tmp_path / "folder")
    batch = draw(buffer, 0)
    with pytest.raises(SaveError, match="removed or moved"):
        old.flush()
    del old
    gc.collect()
    buffer.close()
    assert_same(draw(CompressedReplayBuffer.load(tmp_path / "folder", "cpu"), 0), batch)


@needs_fork
def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    """Also where it was killed before its first flush."""

    def fill_and_die() -> None:
        kept = filled(tmp_path, frame_stack=4)  # which needs no second file for another layout
        assert kept.size()
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(3):
        child = multiprocessing.get_context("fork").Process(target=fill_and_die)
        child.start()
        child.join()
    assert len(list(tmp_path.glob("*.arena"))) == 1
    (tmp_path / "foreign.arena").touch()
    buffer = on_disk(tmp_path)
    assert buffer.size() == 0
    assert names(tmp_path) == ["foreign", "lock", "observations"]
    buffer.close()
