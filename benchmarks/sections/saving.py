"""Saving a full buffer to disk and loading it."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.plan import GAME, Plan
from benchmarks.results import Absent, Table
from benchmarks.streams import Stream
from benchmarks.subjects import library_of
from benchmarks.workers import Workers

SAVE, LOAD, SIZE = "save, ms", "load, ms", "file, bytes per transition"


def measure(plan: Plan) -> Table:
    stream = Stream(GAME, plan.game_steps, 4, plan.game_steps, 4)
    table = Table("saving", "Saving and loading: MsPacman", [SAVE, LOAD, SIZE])
    table.notes.append(f"{stream.transitions:,} transitions; files are in the system's cache when they are loaded.")
    with Workers(plan.saving_subjects, "saving") as workers:
        workers.at_once("make", stream=asdict(stream))
        workers.at_once("fill", steps=stream.steps)
        failed_before = set(workers.failures)
        for subject, found in workers.in_turn(plan.saving_rounds, "save_and_load").items():
            table.put(subject, SAVE, [one["save"] for one in found])
            table.put(subject, LOAD, [one["load"] for one in found])
            table.put(subject, SIZE, [found[-1]["size"] / stream.transitions])
        cannot = [name for name in workers.failures if name not in failed_before and library_of(name).peers]
        for subject in cannot:
            # That another library cannot save its buffer is a result, not a failure of the run.
            reason = workers.failures.pop(subject).rpartition("failed: ")[2]
            for column in table.columns:
                table.put(subject, column, Absent(f"cannot: {reason}"))
        table.failures = workers.failures
    return table
