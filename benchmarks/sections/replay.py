"""Replay buffers on one recording: memory, and the time of ``add`` and ``sample``."""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain

from benchmarks.plan import Plan
from benchmarks.results import Absent, Table
from benchmarks.streams import Stream
from benchmarks.workers import Workers

BATCHES = {32: 8, 256: 3, 1024: 1}
"""Batch size → number of batches that are drawn in one turn."""
FEWEST_ROUNDS = 3
"""The fewest rounds over which the growth of memory is measured."""
CHECKED_ROWS = 512
"""Size of the batch in which every transition must be one that was stored."""

BYTES, FIXED, PAYLOAD = "memory, bytes per transition", "fixed, MB", "payload, bytes per frame"
ADD, ADD_AGAIN = "add, µs", "overwrite, µs"
SAMPLE = {size: f"sample({size}), µs" for size in BATCHES}


def measure(plan: Plan, name: str) -> Table:
    data = plan.data[name]
    stream = data.stream(name)
    table = Table(f"replay-{name}", data.title, [BYTES, FIXED, PAYLOAD, ADD, ADD_AGAIN, *SAMPLE.values()])
    table.notes.append(f"{stream.transitions:,} transitions of {stream.n_envs} environments.")
    with Workers(data.subjects, name) as workers:
        workers.at_once("load_library")
        workers.at_once("make", stream=asdict(stream))
        _fill(workers, stream, plan.fill_rounds, table)
        for size, times in BATCHES.items():
            found = workers.in_turn(plan.sample_rounds, "sample", batch_size=size, times=times)
            table.put_all(SAMPLE[size], {subject: list(chain(*batches)) for subject, batches in found.items()})
        _check(workers, table)
        table.failures = workers.failures
    return table


def _fill(workers: Workers, stream: Stream, rounds: int, table: Table) -> None:
    """Fill the buffers, overwrite everything once, and enter times and memory.

    The growth of memory is measured once ``auto`` has settled on a method, if that leaves at least a few rounds.
    """
    made = workers.at_once("growth")
    steps = stream.steps // rounds
    first = workers.in_turn(rounds // 4, "fill", steps=steps, remember=True)
    unsettled = max(workers.at_once("steps_until_settled").values(), default=0)
    early = min(rounds // 4 - (-unsettled // steps), rounds - FEWEST_ROUNDS)
    more = workers.in_turn(early - rounds // 4, "fill", steps=steps, remember=True)
    grown = workers.at_once("growth")
    rest = workers.in_turn(rounds - early, "fill", steps=steps, remember=True)
    for subject, left in workers.at_once("steps_until_settled").items():
        if left:
            table.notes.append(f"{subject} had not settled on a method when its memory was measured.")
    for subject, payload in workers.at_once("payload_per_frame").items():
        table.put(subject, PAYLOAD, Absent("no account") if payload is None else [payload])
    again = workers.in_turn(rounds, "fill", steps=steps, remember=True)
    table.put_all(ADD, {subject: first[subject] + more[subject] + found for subject, found in rest.items()})
    table.put_all(ADD_AGAIN, again)
    added = (rounds - early) * steps * stream.n_envs
    held = rounds * steps * stream.n_envs
    for subject, total in workers.at_once("growth").items():
        each = made[subject] / held + (total - grown[subject]) / added
        table.put(subject, BYTES, [each])
        table.put(subject, FIXED, [(total - each * held) / 1e6])


def _check(workers: Workers, table: Table) -> None:
    for subject, share in workers.at_once("wrong_rows", batch_size=CHECKED_ROWS).items():
        if share:
            table.notes.append(f"**{subject} returns transitions that were never stored: {share:.1%} of a sample.**")
