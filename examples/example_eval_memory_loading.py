"""Read the same game from a rollout buffer with every compression method, and compare memory and time.

Like example_eval_memory_saving.py, but for rollout buffers, and latency is the time to draw everything once, in batches
of 64.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer
from tqdm import tqdm

import common
from example_eval_memory_saving import BASELINE, chosen, memory_arguments, play, summary
from sb3_extra_buffers.compressed import CompressedRolloutBuffer
from sb3_extra_buffers.measure.memory import settled_rss
from sb3_extra_buffers.measure.processes import run_in_fresh_process


def main(argv: Sequence[str] | None = None) -> None:
    options = memory_arguments(__doc__).parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        recording = play(options, Path(folder))
        rows = [
            (method, run_in_fresh_process(load, recording, method, options.device))
            for method in tqdm([BASELINE, *chosen(options.methods)], unit="method")
        ]
    print(summary(rows))


def load(path: Path, method: str, device: str) -> tuple[int, int, float]:
    """Fill a buffer and read it. Returns what observations take, by how much this process grew, and seconds."""
    recording = pickle.loads(path.read_bytes())
    steps = recording.size()
    read(filled(recording, method, device, steps=min(50, steps)))  # loads and compiles what it needs
    before = settled_rss()
    buffer = filled(recording, method, device, steps)
    grown = settled_rss() - before
    return common.observation_bytes(buffer), grown, read(buffer)


def filled(recording: ReplayBuffer, method: str, device: str, steps: int) -> Any:
    arguments = (steps, recording.observation_space, recording.action_space, device)
    buffer: Any
    if method == BASELINE:
        buffer = RolloutBuffer(*arguments, n_envs=recording.n_envs)
    else:
        buffer = CompressedRolloutBuffer(*arguments, n_envs=recording.n_envs, compression_method=method)
    nothing = th.zeros(recording.n_envs)
    starts = np.ones(recording.n_envs)
    for step in range(steps):
        obs, action, reward = recording.observations[step], recording.actions[step], recording.rewards[step]
        buffer.add(obs, action, reward, starts, nothing, nothing)
        starts = recording.dones[step]
    return buffer


def read(buffer: Any) -> float:
    began = time.perf_counter()
    for batch in buffer.get(64):
        assert len(batch.observations) <= 64
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
