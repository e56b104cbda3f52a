"""Rollout buffers as PPO uses them: filled once, then read in several epochs."""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain

from benchmarks.plan import GAME, Plan
from benchmarks.results import Table
from benchmarks.streams import Stream
from benchmarks.workers import Workers

N_ENVS, STEPS, EPOCHS, BATCH_SIZE = 8, 128, 4, 256
TIME = "fill and 4 epochs, ms"


def measure(plan: Plan) -> Table:
    table = Table("rollouts", "Rollouts: MsPacman", [TIME])
    table.notes.append(f"{N_ENVS} environments, {STEPS} steps, {EPOCHS} epochs in batches of {BATCH_SIZE}.")
    stream = Stream(GAME, STEPS, N_ENVS, plan.game_steps, 4)
    with Workers(plan.rollout_subjects, "rollouts") as workers:
        workers.at_once("make_rollouts", stream=asdict(stream), epochs=EPOCHS, batch_size=BATCH_SIZE)
        found = workers.in_turn(plan.rollout_rounds, "rollouts", times=2)
        table.put_all(TIME, {subject: list(chain(*times)) for subject, times in found.items()})
        table.failures = workers.failures
    return table
