"""Segments and sharded buffers: bytes on the wire, transitions ingested per second, and ``sample`` over several parts.

    python -m benchmarks.studies.segments

A small buffer, like a collector's, stores steps and exports segments. A large one, like the learner's, ingests them.
Then one buffer and buffers of several parts hold the same transitions, and are sampled in turn. Everything runs in one
process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import islice

import numpy as np

from benchmarks.recordings import Recording, load_recording, transitions
from benchmarks.report import markdown_table
from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.distributed import ShardedReplayBuffer

N_ENVS = 4
SEGMENT_STEPS = (16, 32, 64)
PARTS = (2, 4, 16)
BATCH_SIZE = 256


def send(recording: Recording, n_steps: int, segment_steps: int) -> tuple[float, float, float]:
    """Bytes on the wire, transitions ingested per second (median), and bytes at the learner, per transition."""
    spaces = recording.observation_space, recording.action_space
    collector = CompressedReplayBuffer(4 * segment_steps * N_ENVS, *spaces, "cpu", N_ENVS)
    learner = CompressedReplayBuffer(n_steps * N_ENVS, *spaces, "cpu", N_ENVS)
    played = transitions(recording)
    sizes, rates = [], []
    for _ in range(n_steps // segment_steps):
        for transition in islice(played, segment_steps):
            collector.add(*transition)
        segment = collector.export_segment()
        began = time.perf_counter()
        learner.ingest_segment(segment)
        rates.append(segment_steps * N_ENVS / (time.perf_counter() - began))
        sizes.append(len(segment))
    later = slice(len(sizes) // 4, None)  # auto has chosen its method by then
    on_the_wire = sum(sizes[later]) / len(sizes[later]) / segment_steps / N_ENVS
    return on_the_wire, statistics.median(rates[later]), learner.memory_usage().bytes_per_transition


def compare_parts(recording: Recording, n_steps: int, repeats: int) -> dict[int, tuple[float, float]]:
    """For each number of parts, the median time of ``sample`` in seconds, and that of one buffer divided by it."""
    spaces = recording.observation_space, recording.action_space
    buffers = {
        parts: ShardedReplayBuffer(n_steps * N_ENVS, *spaces, "cpu", N_ENVS, parts=parts) for parts in (1, *PARTS)
    }
    for step, transition in enumerate(islice(transitions(recording), n_steps)):
        for parts, buffer in buffers.items():
            buffer.add(*transition, part=step * parts // n_steps)
    times: dict[int, list[float]] = {parts: [] for parts in buffers}
    for _ in range(repeats):
        for parts, buffer in buffers.items():
            began = time.perf_counter()
            buffer.sample(BATCH_SIZE)
            times[parts].append(time.perf_counter() - began)
    ratios = {parts: np.median(np.divide(times[1], times[parts])) for parts in buffers}
    return {parts: (statistics.median(times[parts]), float(ratios[parts])) for parts in buffers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mspacman,halfcheetah", help="recordings (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6_000, help="steps of each environment (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=300, help="batches from each buffer (default: %(default)s)")
    given = parser.parse_args()
    for name in given.data.split(","):
        recording = load_recording(name, given.steps, N_ENVS)
        print(f"\n{name}, {given.steps * N_ENVS:,} transitions of {N_ENVS} environments\n")
        heads = ("steps per segment", "bytes per transition on the wire", "ingested per second", "bytes at the learner")
        sent = {segment_steps: send(recording, given.steps, segment_steps) for segment_steps in SEGMENT_STEPS}
        print(markdown_table(heads, [(str(steps), *(f"{n:,.0f}" for n in found)) for steps, found in sent.items()]))
        compared = compare_parts(recording, given.steps, given.repeats)
        rows = [(str(parts), f"{1e6 * seconds:,.0f}", f"{ratio:.2f}") for parts, (seconds, ratio) in compared.items()]
        heads_of_parts = ("parts", f"`sample({BATCH_SIZE})`, µs", "speed relative to one buffer")
        print("\n" + markdown_table(heads_of_parts, rows))


if __name__ == "__main__":
    main()
