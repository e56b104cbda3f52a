"""Fills a buffer on disk well past its capacity, samples from it, and prints what that took, as JSON.

python -m tests.persistence.disk_probe FOLDER TRANSITIONS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from gymnasium import spaces

from sb3_extra_buffers.compressed import CompressedReplayBuffer

N_ENVS = 125
FRAMES = spaces.Box(0, 255, (1, 16, 32), np.uint8)
_KILOBYTE = 1024


def anonymous_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * _KILOBYTE
    raise OSError("This system does not tell RssAnon.")


def make(slots: int, folder: Path) -> CompressedReplayBuffer:
    return CompressedReplayBuffer(
        slots * N_ENVS,
        FRAMES,
        spaces.Discrete(5),
        "cpu",
        n_envs=N_ENVS,
        compression_method="none",
        frame_stack=None,
        storage="mmap",
        path=folder,
    )


def add(buffer: CompressedReplayBuffer, noise: np.ndarray, step: int) -> None:
    nothing = np.zeros(N_ENVS)
    obs, next_obs = (noise ^ np.uint8(number % 251) for number in (step, step + 1))
    buffer.add(obs, next_obs, nothing, nothing + step, nothing, [{}] * N_ENVS)


def main(folder: Path, n_transitions: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, size=(N_ENVS, *FRAMES.shape), dtype=np.uint8)
    small = make(20, folder / "small")  # has everything imported and compiled
    for step in range(50):
        add(small, noise, step)
    small.sample(256)
    before = most = anonymous_memory()
    slots = n_transitions // N_ENVS
    buffer = make(slots, folder / "buffer")
    for step in range(slots * 3 // 2):
        add(buffer, noise, step)
        if step % 50 == 0:
            buffer.sample(256)
            most = max(most, anonymous_memory())
    rewards = buffer.sample(256).rewards
    usage = buffer.memory_usage()
    found = {"anonymous": most - before, "data": usage.total, "transitions": usage.transitions, "oldest": rewards.min()}
    found["file"] = sum(file.stat().st_size for file in (folder / "buffer").glob("*.arena"))
    sys.stdout.write(json.dumps({name: int(value) for name, value in found.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
