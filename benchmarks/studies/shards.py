"""Sampling from shards in other processes of this machine, compared with one buffer in this process.

    python -m benchmarks.studies.shards [--real-time]

One buffer in this process and shards, which are Ray actors, hold the same transitions. They are sampled in turn, 128
batches at a time. How long the learner waits for a batch of shards depends on how many it requests ahead. Those are
ready when a turn begins, at most 16 of the 128. CPU time is that of this process and of the shards together. It depends
less on what else the machine does.

If each batch is freed before the next is made, its memory is reused while it is still in the CPU's cache. A second row
keeps each batch until the next one exists, as SB3's training loops do.

On a busy machine, processes wait for each other and for a core, and a comparison means little. With --real-time, the
processes under measurement have real-time priority during their turns. This needs root.
"""

from __future__ import annotations

import argparse
import os
import pickle
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.recordings import load_recording, transitions
from benchmarks.report import markdown_table
from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.distributed import ShardedReplayBuffer

N_ENVS, SEGMENT_STEPS, IN_TURN = 4, 32, 128
KEPT = "one buffer, the last batch kept"


def bytes_of_a_batch(buffer: Any, batch_size: int, is_near: bool) -> int:
    """Bytes that shards send for a batch, on this machine or on another, which cannot write to the learner's memory."""
    shards = buffer._shards
    (request,) = shards._request(batch_size, 1)
    if is_near:
        replies = [reply for _, reply in shards._replies(request)]
    else:
        asked = [(call.shard, call.asked[place][0]) for call, place in request.pieces]
        handles = [(shard, shards._call(shard, "draw", [(places, None)])) for shard, places in asked]
        replies = [reply for shard, handle in handles for reply in shards._result(shard, handle)]
    return sum(len(pickle.dumps(reply, protocol=5)) for reply in replies)


def cpu_seconds(buffer: Any) -> float:
    """The CPU time so far of this process and of the shards of a buffer."""
    shards = getattr(buffer, "_shards", None)
    actors = [] if shards is None else shards._transport._actors
    asked = [actor.__ray_call__.remote(lambda actor: time.process_time()) for actor in actors]
    return time.process_time() + float(sum(ray.get(asked)))


@contextmanager
def priority(buffer: Any, is_real_time: bool) -> Iterator[None]:
    """Give the threads of this process, and of the shards of a buffer, priority over all others."""
    shards = getattr(buffer, "_shards", None)
    actors = [] if shards is None else shards._transport._actors
    asked = [actor.__ray_call__.remote(lambda actor: os.getpid()) for actor in actors]
    processes = [os.getpid(), *ray.get(asked)] if is_real_time else []
    threads = [int(path.name) for process in processes for path in Path(f"/proc/{process}/task").iterdir()]
    for thread in threads:
        os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        for thread in threads:
            with suppress(ProcessLookupError):
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mspacman,halfcheetah", help="recordings (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6_000, help="steps of each environment (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="turns (default: %(default)s)")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--real-time", action="store_true", help="real-time priority for what is measured; needs root")
    given = parser.parse_args()
    for name in given.data.split(","):
        recording = load_recording(name, given.steps, N_ENVS)
        spaces = recording.observation_space, recording.action_space
        size = given.steps * N_ENVS
        here = CompressedReplayBuffer(size, *spaces, "cpu", N_ENVS)
        there = {
            prefetch: ShardedReplayBuffer(
                size, *spaces, "cpu", N_ENVS, placement="shards", shards=given.shards, prefetch=prefetch
            )
            for prefetch in (1, 4, 16)
        }
        collector = CompressedReplayBuffer(2 * SEGMENT_STEPS * N_ENVS, *spaces, "cpu", N_ENVS)
        played, last_part = transitions(recording), 0
        for number in range(given.steps // SEGMENT_STEPS):
            for step in islice(played, SEGMENT_STEPS):
                collector.add(*step)
                here.add(*step)
            # Parts are filled one after the other.
            part = number * given.shards * SEGMENT_STEPS // given.steps
            segment = collector.export_segment(restart=part != last_part)
            for buffer in there.values():
                buffer.ingest_segment(segment, part=part)
            last_part = part
        print(f"\n{name}, {size:,} transitions, {given.shards} shards, batches of {given.batch_size}\n")
        times: dict[str, list[float]] = {}
        cpu: dict[str, list[float]] = {}
        buffers: dict[str, Any] = {"one buffer": here, KEPT: here}
        buffers |= {f"{ahead} ahead": buffer for ahead, buffer in there.items()}
        for _ in range(given.repeats):
            for label, buffer in buffers.items():
                buffer.sample(given.batch_size)
                with priority(buffer, given.real_time):
                    used, began = cpu_seconds(buffer), time.perf_counter()
                    kept: deque[Any] = deque(maxlen=int(label == KEPT))
                    for _ in range(IN_TURN):
                        kept.append(buffer.sample(given.batch_size))
                    times.setdefault(label, []).append((time.perf_counter() - began) / IN_TURN)
                    cpu.setdefault(label, []).append((cpu_seconds(buffer) - used) / IN_TURN)
        rows = []
        for label, seconds in times.items():
            ratio = np.median(np.divide(times["one buffer"], seconds))
            numbers = (1e3 * np.median(seconds), ratio, 1e3 * np.median(cpu[label]))
            rows.append((label, *(f"{number:.2f}" for number in numbers)))
        print(markdown_table(("", "ms per batch", "speed relative to one buffer", "CPU ms per batch"), rows))
        for where, is_near in {"this machine": True, "another machine": False}.items():
            sent = bytes_of_a_batch(there[4], given.batch_size, is_near)
            each = sent // given.batch_size
            print(f"\nShards on {where} send {sent:,} bytes for a batch, {each:,} for a transition")
        for buffer in there.values():
            buffer.close()


if __name__ == "__main__":
    main()
