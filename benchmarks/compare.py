"""Compressed buffers next to SB3's, on recordings of real environments.

    python -m benchmarks.compare --names mspacman --steps 25000

Memory is the growth of the resident set of a fresh process that fills a buffer and overwrites it once. Times come from
one process in which the subjects take turns; the table shows medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import islice
from pathlib import Path
from typing import Any

import torch as th
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer
from tqdm import tqdm

from benchmarks.memory import rss, run_in_fresh_process
from benchmarks.recordings import Recording, load_recording, transitions
from sb3_extra_buffers.compressed import CompressedRolloutBuffer
from sb3_extra_buffers.measure.subjects import SB3, make_replay_buffer
from sb3_extra_buffers.measure.timing import Times, microseconds, time_replay_buffers

METHODS = ["auto", "delta", "zstd-dict/3", "zstd-dict/9", "zstd-dict/9 x8", "zstd-5", "igzip1", "lz4-frame/1", "none"]
BATCH_SIZES = (32, 256)
ROLLOUT_STEPS = 128


def make_buffer(subject: str, recording: Recording) -> ReplayBuffer:
    """A buffer that holds the whole recording. ``zstd-dict/9 x8`` is ``zstd-dict/9`` with 8 frames per record."""
    size = recording.steps * recording.n_envs
    return make_replay_buffer(subject, size, recording.observation_space, recording.action_space, recording.n_envs)


def memory_per_transition(subject: str, name: str, steps: int, n_envs: int) -> float:
    """Resident bytes per transition after a full fill and a full overwrite. To be run in a fresh process."""
    recording = load_recording(name, steps, n_envs)
    warm_up = make_buffer(subject, load_recording(name, 200, n_envs))
    for transition in transitions(load_recording(name, 200, n_envs)):
        warm_up.add(*transition)
    del warm_up
    for _ in transitions(load_recording(name, 600, n_envs)):
        pass
    before = rss()
    buffer = make_buffer(subject, recording)
    for _ in range(1 if subject == SB3 else 2):  # SB3's arrays do not change when they are overwritten
        for transition in transitions(recording):
            buffer.add(*transition)
    return (rss() - before) / (steps * n_envs)


def timings(subjects: list[str], recording: Recording, repeats: int) -> Times:
    """Microseconds of ``add`` and of ``sample``, the subjects taking turns."""
    buffers = {subject: make_buffer(subject, recording) for subject in subjects}
    return time_replay_buffers(buffers, transitions(recording), recording.steps, BATCH_SIZES, repeats)


def rollout_timings(subjects: list[str], recording: Recording, repeats: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of filling a rollout buffer with 128 steps and of four epochs of batches of 256."""
    buffers = {subject: make_rollout_buffer(subject, recording) for subject in subjects}
    spent: dict[str, list[float]] = {subject: [] for subject in subjects}
    steps = list(islice(transitions(recording), ROLLOUT_STEPS))
    zeros = th.zeros(recording.n_envs)

    def one_rollout(buffer: RolloutBuffer) -> None:
        buffer.reset()
        for step in steps:
            buffer.add(step.obs, step.action, step.reward, step.done, zeros, zeros)
        for _ in range(4):
            for _ in buffer.get(256):
                pass

    for repeat in tqdm(range(repeats + 6), "rollouts"):
        for subject in subjects[repeat % 2 :] + subjects[: repeat % 2]:
            elapsed = microseconds(one_rollout, buffers[subject])
            if repeat > 5:  # in the first ones, "auto" chooses
                spent[subject].append(elapsed / 1000)
    return {subject: {"add + 4 epochs, ms": statistics.median(times)} for subject, times in spent.items()}


def make_rollout_buffer(subject: str, recording: Recording) -> RolloutBuffer:
    arguments: dict[str, Any] = {"device": "cpu", "n_envs": recording.n_envs}
    if subject == SB3:
        return RolloutBuffer(ROLLOUT_STEPS, recording.observation_space, recording.action_space, **arguments)
    return CompressedRolloutBuffer(
        ROLLOUT_STEPS, recording.observation_space, recording.action_space, compression_method=subject, **arguments
    )


def table(results: dict[str, dict[str, float]]) -> str:
    """Markdown, with the factor by which each subject beats SB3."""
    columns = list(next(iter(results.values())))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for subject, row in results.items():
        cells = [
            f"{row[c]:,.0f} ({results[SB3][c] / row[c]:.2f}×)" if SB3 in results else f"{row[c]:,.0f}" for c in columns
        ]
        lines.append(f"| {subject} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", default="mspacman", help="recordings, separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods, separated by commas")
    parser.add_argument("--steps", type=int, default=25_000, help="steps per environment")
    parser.add_argument("--n-envs", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=200, help="samples per batch size")
    parser.add_argument("--no-memory", action="store_true", help="only measure time")
    parser.add_argument("--no-time", action="store_true", help="only measure memory")
    parser.add_argument(
        "--rollout", action="store_true", help="rollout buffers instead; with --n-envs 8 as PPO has them"
    )
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    everything = {}
    for name in arguments.names.split(","):
        recording = load_recording(name, arguments.steps, arguments.n_envs)
        subjects = [SB3, *arguments.methods.split(",")]
        results: dict[str, dict[str, float]] = {subject: {} for subject in subjects}
        if not (arguments.no_memory or arguments.rollout):
            for subject in tqdm(subjects, f"memory, {name}"):
                found = run_in_fresh_process(memory_per_transition, subject, name, arguments.steps, arguments.n_envs)
                results[subject]["bytes per transition"] = found
        if arguments.rollout:
            for subject, times in rollout_timings(subjects, recording, arguments.repeats).items():
                results[subject] |= times
        elif not arguments.no_time:
            for subject, times in timings(subjects, recording, arguments.repeats).items():
                results[subject] |= {f"{key}, µs": value for key, value in times.items()}
        print(f"\n{name}, {arguments.steps * arguments.n_envs:,} transitions, {arguments.n_envs} environments\n")
        print(table(results))
        everything[name] = results
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
