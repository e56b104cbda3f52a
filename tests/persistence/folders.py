"""Buffers on disk, and what is done with them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.persistence.buffers import add, make, steps_for

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


USES = {
    "add": lambda buffer, path: buffer.add(*steps_for(buffer, 1)[0]),
    "sample": lambda buffer, path: buffer.sample(1),
    "flush": lambda buffer, path: buffer.flush(),
    "save": lambda buffer, path: buffer.save(path / "file"),
    "pickle": lambda buffer, path: pickle.dumps(buffer),
}
