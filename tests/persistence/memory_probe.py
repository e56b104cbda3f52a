"""Measures what saving and loading takes of the process that runs this, beside the buffer itself.

python -m tests.persistence.memory_probe save PATH
python -m tests.persistence.memory_probe load PATH
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.measure.memory import peak_rss, settled_rss

N_ENVS = 32
FRAMES = spaces.Box(0, 255, (1, 32, 32), np.uint8)
SLOTS = 5000


def make_buffer(slots: int) -> CompressedReplayBuffer:
    return CompressedReplayBuffer(
        slots * N_ENVS, FRAMES, spaces.Discrete(5), "cpu", n_envs=N_ENVS, compression_method="none", frame_stack=1
    )


def fill(buffer: CompressedReplayBuffer, steps: int) -> None:
    rng, nothing = np.random.default_rng(0), np.zeros(N_ENVS)
    frames = rng.integers(0, 256, size=(17, N_ENVS, *FRAMES.shape), dtype=np.uint8)

    def at(step: int) -> Any:
        return frames[step % 17] ^ np.uint8(step // 17 % 256)

    for step in range(steps):
        buffer.add(at(step), at(step + 1), nothing, nothing, nothing, [{}] * N_ENVS)


def peak_of(action: Any) -> int:
    """The most that resident memory was while ``action`` ran."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from now
    action()
    return peak_rss()


def saving(path: Path) -> dict[str, int]:
    fill(make_buffer(60), 100)  # has everything imported and compiled
    before = settled_rss()
    buffer = make_buffer(SLOTS)
    fill(buffer, SLOTS * 5 // 4)
    pickled = peak_of(lambda: save_to_pkl(path.with_suffix(".pkl"), buffer))
    saved = peak_of(lambda: buffer.save(path))
    return {"live": buffer.memory_usage().total, "pickle": pickled - before, "save": saved - before}


def loading(path: Path) -> dict[str, int]:
    fill(make_buffer(60), 100)
    before = settled_rss()
    held: list[Any] = []
    found = {}
    for name, load in (
        ("save", lambda: held.append(CompressedReplayBuffer.load(path, "cpu"))),
        ("pickle", lambda: held.append(load_from_pkl(path.with_suffix(".pkl")))),
    ):
        found[name] = peak_of(load) - before
        found["live"] = held.pop().memory_usage().total
        settled_rss()
    return found


def converting(path: Path) -> dict[str, int]:
    """From SB3's buffer, and back."""
    fill(make_buffer(60), 100)
    plain = ReplayBuffer(SLOTS * N_ENVS // 2, FRAMES, spaces.Discrete(5), "cpu", n_envs=N_ENVS)
    for slot in range(plain.buffer_size):
        plain.observations[slot] = plain.next_observations[slot - 1] = slot % 256
    plain.full = True
    raw = plain.observations.nbytes + plain.next_observations.nbytes
    held: list[Any] = [plain]
    del plain
    before = settled_rss()
    there = peak_of(lambda: held.append(CompressedReplayBuffer.from_sb3(held[0], "cpu"))) - before
    del held[0]
    before = settled_rss()
    back = peak_of(lambda: held.append(held[0].to_sb3())) - before
    return {"raw": raw, "there": there, "back": back}


if __name__ == "__main__":
    action = {"save": saving, "load": loading, "convert": converting}[sys.argv[1]]
    sys.stdout.write(json.dumps(action(Path(sys.argv[2]))))
