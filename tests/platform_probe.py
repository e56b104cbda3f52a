"""A program that uses buffers after calls that only some systems have are taken away: ``platform_probe.py SYSTEM``.

Everything that Python lacks on macOS or Windows goes before the library is imported. Results must be those of SB3's
buffer, bit for bit.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

for package in ("filelock", "numba", "psutil", "zstandard"):  # these must see the true system
    if find_spec(package):
        import_module(package)

MISSING = {
    "darwin": ["sched_getaffinity", "posix_fallocate", "memfd_create", "copy_file_range"],
    "win32": ["sched_getaffinity", "posix_fallocate", "memfd_create", "copy_file_range", "fork", "register_at_fork",
              "O_NOFOLLOW", "getuid", "statvfs"],
}  # fmt: skip
STEPS, SLOTS, ENVS = 260, 90, 2
OBSERVATIONS = spaces.Box(0, 255, (36, 36, 4), np.uint8)


class NoMremap(mmap.mmap):
    """As on systems whose kernel cannot move pages."""

    def resize(self, size: int) -> None:
        raise SystemError("mmap: resizing not available--no mremap()")


def become(system: str) -> None:
    for name in MISSING[system]:
        if hasattr(os, name):
            delattr(os, name)
    sys.platform = system
    mmap.mmap = NoMremap  # type: ignore[misc]
    from sb3_extra_buffers import parallel
    from sb3_extra_buffers.persistence import disk

    parallel._parallel_function.cache_clear()
    parallel._parallel_function = lambda: 0  # type: ignore[assignment]  # their OpenMP is another one
    if system == "win32":
        # Not os.name itself, which pathlib asks for. Directories cannot be opened there.
        disk.os = SimpleNamespace(fsync=os.fsync, name="nt")  # type: ignore[attr-defined]


def transitions() -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    frames = np.repeat(rng.integers(0, 256, (STEPS + 5, ENVS, 36, 36), dtype=np.uint8) // 8 * 8, 1, axis=0)
    frames[:, :, 6:] = 40  # most of an image stays
    stacks = np.stack([frames[n : n + STEPS + 1] for n in range(4)], axis=-1)
    return [
        (stacks[step], stacks[step + 1], np.full((ENVS, 1), step % 3), np.full(ENVS, float(step)), np.zeros(ENVS),
         [{} for _ in range(ENVS)])
        for step in range(STEPS)
    ]  # fmt: skip


def assert_same_batches(plain: Any, buffer: Any) -> None:
    for size in (8, 256, 1024):  # the last is worth several threads
        np.random.seed(size)
        expected = plain.sample(size)
        np.random.seed(size)
        for left, right in zip(expected, buffer.sample(size), strict=True):
            assert left is right or th.equal(left, right)


def main(system: str) -> None:
    become(system)
    from sb3_extra_buffers.compressed import CompressedReplayBuffer
    from sb3_extra_buffers.parallel import core_count

    arguments: tuple[Any, ...] = (SLOTS * ENVS, OBSERVATIONS, spaces.Discrete(3), "cpu", ENVS)
    assert core_count() == os.cpu_count()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = ReplayBuffer(*arguments)
        buffers = [
            CompressedReplayBuffer(*arguments),
            CompressedReplayBuffer(*arguments, compression_method="none"),
            CompressedReplayBuffer(*arguments, storage="mmap", path=folder / "disk"),
        ]
        for transition in transitions():
            for buffer in [plain, *buffers]:
                buffer.add(*transition)
        for number, buffer in enumerate(buffers):
            assert_same_batches(plain, buffer)
            path = folder / f"saved-{number}"
            buffer.save(path)
            mapped = CompressedReplayBuffer.load(path, "cpu", mmap=True)
            buffer.save(path)  # over a file that is mapped
            assert_same_batches(plain, CompressedReplayBuffer.load(path, "cpu"))
            assert_same_batches(plain, mapped)
        buffers[-1].close()
        assert_same_batches(plain, CompressedReplayBuffer.load(folder / "disk", "cpu"))
    print(f"works without what {system} lacks")


if __name__ == "__main__":
    main(sys.argv[1])
