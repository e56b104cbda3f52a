"""One observation passes at most five files on its way to bytes, and five on its way back, as the docs say."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import sb3_extra_buffers
from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.storage.arena import Arena

PACKAGE = Path(sb3_extra_buffers.__file__).parent
DOCS = PACKAGE.parents[1] / "docs" / "how-it-works.md"


class Trace:
    """The files on the call stack whenever one of the watched functions runs, and the files of those functions."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def watch(self, patch: pytest.MonkeyPatch, owner: Any, name: str, file: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any) -> Any:
            frame: Any = sys._getframe(1)
            while frame is not None:
                path = Path(frame.f_code.co_filename)
                if PACKAGE in path.parents:
                    self.files.add(path.relative_to(PACKAGE).as_posix())
                frame = frame.f_back
            self.files.add(file)
            return function(*args)

        patch.setattr(owner, name, watched)


def documented(heading: str) -> set[str]:
    """The files of a list in the docs, which begins with ``heading``."""
    line = next(line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith(heading))
    return set(re.findall(r"`([a-z_/]+\.py)`", line.replace("<method>", "delta")))


@pytest.mark.skipif(not has_numba(), reason="without numba, there is no kernel to follow into")
def test_five_files_there_and_five_back(monkeypatch: pytest.MonkeyPatch) -> None:
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffer = CompressedReplayBuffer(
        100, space, spaces.Discrete(2), device="cpu", compression_method="delta", frame_stack=4
    )
    frames = np.random.default_rng(0).integers(0, 2, (104, 84, 84), dtype=np.uint8)
    adding, sampling = Trace(), Trace()
    with monkeypatch.context() as patch:
        adding.watch(patch, DeltaCodec, "encode", "codecs/delta.py")
        adding.watch(patch, Arena, "write", "storage/arena.py")
        for t in range(99):
            pair = frames[None, t : t + 4], frames[None, t + 1 : t + 5]
            buffer.add(*pair, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
    with monkeypatch.context() as patch:
        kernels = load_kernels("sb3_extra_buffers.storage.gather_kernels")
        sampling.watch(patch, kernels, "gather_observations", "storage/gather_kernels.py")
        buffer.sample(8)
    assert adding.files == documented("Adding:")
    assert sampling.files == documented("Sampling:")
    assert len(adding.files) <= 5
    assert len(sampling.files) <= 5
