"""MsPacman in larger and larger buffers, and with more and more environments."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import chain

import psutil
from tqdm import tqdm

from benchmarks.plan import GAME, Plan
from benchmarks.results import Absent, Table
from benchmarks.streams import Stream
from benchmarks.workers import Worker, WorkerError, Workers

RECORDED_ENVS = 4
BATCH_SIZE = 256
SPARE_MEMORY = 0.8
"""The share of the available memory that a subject may use."""


def measure_sizes(plan: Plan) -> Table:
    """Measure one subject at a time, so that each has the memory of the machine to itself.

    Memory and time of a size are extrapolated from the size before. A size that would need more memory than is
    available, or more time than the plan allows, is skipped, and its cells say why.
    """
    columns = [f"{what} at {size:,}" for size in plan.sizes for what in ("memory, MB", "sample(256), µs")]
    table = Table("sizes", "From small to large: MsPacman", columns)
    table.notes.append(f"{RECORDED_ENVS} environments; memory is the growth of the process until the buffer is full.")
    for subject in tqdm(plan.scaling_subjects, "sizes", leave=False, disable=None):
        grown, spent, before = 0.0, 0.0, 0
        for size in plan.sizes:
            steps = size // RECORDED_ENVS
            factor = size / before if before else 0
            reason = _too_much(grown * factor, spent * factor, plan.seconds_per_size)
            memory, sample = (f"memory, MB at {size:,}", f"sample(256), µs at {size:,}")
            if reason:
                table.put(subject, memory, Absent(reason))
                table.put(subject, sample, Absent(reason))
                continue
            stream = Stream(GAME, steps, RECORDED_ENVS, min(plan.recorded_steps, steps), RECORDED_ENVS)
            worker = Worker(subject)
            try:
                worker.ask("make", stream=asdict(stream))
                began = time.perf_counter()
                worker.ask("fill", steps=stream.steps)
                spent, before = time.perf_counter() - began, size
                grown = worker.ask("growth")
                batches = [worker.ask("sample", batch_size=BATCH_SIZE, times=3) for _ in range(plan.sample_rounds)]
            except WorkerError as error:
                table.failures[subject] = str(error)
                break
            finally:
                worker.close()
            table.put(subject, memory, [grown / 1e6])
            table.put(subject, sample, list(chain(*batches)))
    return table


def _too_much(memory: float, seconds: float, limit: float) -> str | None:
    if memory > SPARE_MEMORY * psutil.virtual_memory().available:
        return f"needs {memory / 1e9:.0f} GB"
    if seconds > limit:
        return f"would take {seconds / 60:.0f} min"
    return None


def measure_envs(plan: Plan) -> Table:
    """Measure the same number of transitions from more and more environments."""
    columns = [
        f"{what} of {count}" for count in plan.env_counts for what in ("add, µs per transition", "sample(256), µs")
    ]
    table = Table("environments", "From one environment to many: MsPacman", columns)
    transitions = plan.game_steps * max(plan.env_counts)  # so that auto settles on a method, however many there are
    rounds = plan.sample_rounds
    table.notes.append(f"{transitions:,} transitions in each buffer.")
    for count in plan.env_counts:
        stream = Stream(GAME, transitions // count, count, plan.game_steps, RECORDED_ENVS)
        subjects = [subject for subject in plan.scaling_subjects if subject not in table.failures]
        with Workers(subjects, f"{count} environments") as workers:
            workers.at_once("make", stream=asdict(stream))
            found = workers.in_turn(rounds, "fill", steps=stream.steps // rounds)
            add, sample = (f"add, µs per transition of {count}", f"sample(256), µs of {count}")
            table.put_all(add, {subject: [time / count for time in times] for subject, times in found.items()})
            batches = workers.in_turn(rounds, "sample", batch_size=BATCH_SIZE, times=3)
            table.put_all(sample, {subject: list(chain(*times)) for subject, times in batches.items()})
            table.failures |= workers.failures
    return table
