"""A buffer can be pickled and saved while another thread adds: a step is in it as a whole, or not at all."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from tests.persistence.buffers import ALL_CLASSES, add, make, steps_for

HOST_CLASSES = [name for name in ALL_CLASSES if not name.startswith("Gpu")]


def saved_and_loaded(buffer: BaseCompressedBuffer, path: Path) -> BaseCompressedBuffer:
    buffer.save(path)
    return type(buffer).load(path, "cpu")


@pytest.mark.parametrize("way", ["pickle", "copy", "save"])
@pytest.mark.parametrize("name", HOST_CLASSES)
def test_what_another_thread_is_adding_is_waited_for(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: dict[str, Callable[[Any], Any]] = {
        "pickle": lambda buffer: pickle.loads(pickle.dumps(buffer)),
        "copy": copy.deepcopy,
        "save": lambda buffer: saved_and_loaded(buffer, tmp_path / "file"),
    }
    buffer: Any = make(name)
    (step,) = steps_for(buffer, 1)
    is_half_stored, is_pickled = threading.Event(), threading.Event()
    commit = buffer._commit

    def slow_commit(*arguments: Any) -> None:
        is_half_stored.set()
        is_pickled.wait(0.2)
        commit(*arguments)

    thread = threading.Thread(target=add, args=(buffer, step, 1))
    with monkeypatch.context() as patch:
        patch.setattr(type(buffer), "_commit", lambda self, *arguments: slow_commit(*arguments))
        thread.start()
        is_half_stored.wait()
        found = ways[way](buffer)
        is_pickled.set()
        thread.join()
    assert found.pos == buffer.pos == 1
    found.check()
