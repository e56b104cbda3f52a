"""Measures what buffers take of the process that runs this, and prints it as JSON.

    python -m tests.compressed.memory_probe zstd

Only the resident memory of a fresh process tells the truth: pages that were freed but not given back count too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from typing import Any

import numpy as np
import psutil
from gymnasium import spaces

from sb3_extra_buffers.compressed import CompressedReplayBuffer

N_ENVS = 16
FRAMES = spaces.Box(0, 255, (1, 16, 16), np.uint8)
ACTIONS = spaces.Discrete(5)


def resident() -> int:
    return psutil.Process().memory_info().rss


def give_back_what_is_free() -> None:
    """The C library keeps some megabytes for later."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def building() -> dict[str, Any]:
    """What a buffer for a million Atari observations costs before anything is in it."""
    atari = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    warm_up(CompressedReplayBuffer(8, atari, ACTIONS, "cpu", n_envs=4))
    before, began = resident(), time.perf_counter()
    buffer = CompressedReplayBuffer(1_000_000, atari, ACTIONS, "cpu", n_envs=4)
    return {"seconds": time.perf_counter() - began, "grown": resident() - before, "slots": buffer.buffer_size}


def filling(method: str, slots: int, turns: int) -> dict[str, Any]:
    """What resident memory grew by each time that a buffer was filled, and what is left of it without the buffer."""
    transitions = make_transitions()
    warm_up(make_buffer(method, slots=50), transitions)
    give_back_what_is_free()  # or else the buffer would use it again, unseen
    before = resident()
    buffer = make_buffer(method, slots)
    grown = []
    for turn in range(turns):
        for step in range(slots):
            buffer.add(*transitions[(step + 7 * turn) % len(transitions)])
        grown.append(resident() - before)
    usage = buffer.memory_usage()
    del buffer
    give_back_what_is_free()
    return {
        "grown": grown,
        "left": resident() - before,
        "payload": usage.payload,
        "reported": usage.total,
        "transitions": usage.transitions,
    }


def make_buffer(method: str, slots: int) -> CompressedReplayBuffer:
    return CompressedReplayBuffer(slots * N_ENVS, FRAMES, ACTIONS, "cpu", n_envs=N_ENVS, compression_method=method)


def make_transitions(n: int = 500) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    frames = np.repeat(rng.integers(0, 256, size=(1, N_ENVS, *FRAMES.shape), dtype=np.uint8), n + 1, axis=0)
    for step in frames:
        for frame in step.reshape(N_ENVS, -1):
            frame[rng.integers(0, frame.size, size=6)] = rng.integers(0, 256, size=6)
    nothing = np.zeros(N_ENVS)
    return [(frames[i], frames[i + 1], nothing, nothing, nothing, [{}] * N_ENVS) for i in range(n)]


def warm_up(buffer: CompressedReplayBuffer, transitions: list[tuple[Any, ...]] | None = None) -> None:
    """Have everything imported, compiled and started that the first use brings along."""
    observations = np.zeros((buffer.n_envs, *buffer.obs_shape), np.uint8)
    nothing = np.zeros(buffer.n_envs)
    for i in range(100):
        step = transitions[i] if transitions else (observations, observations, *[nothing] * 3, [{}] * buffer.n_envs)
        buffer.add(*step)
    buffer.sample(64)


if __name__ == "__main__":
    gc.disable()
    chosen = sys.argv[1]
    measured = {
        "building": building(),
        "filling": filling(chosen, slots=8000, turns=2),
        "overwriting": filling(chosen, slots=500, turns=10),
    }
    sys.stdout.write(json.dumps(measured))
