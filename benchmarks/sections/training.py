"""Whole training runs on MsPacman, with SB3's buffer and with this library's: speed, and whether results are equal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from tqdm import tqdm

from benchmarks.environments import make_env
from benchmarks.plan import GAME, Plan
from benchmarks.results import Absent, Table
from benchmarks.workers import Workers

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Environment variables that let glibc keep freed memory. Otherwise, chance decides how often it returns torch's memory
to the system, and page faults slow down training, whatever the buffer."""


def measure(plan: Plan) -> Table:
    speeds = {algorithm: f"{algorithm}, steps per second" for algorithm in plan.training_steps}
    table = Table("training", "Training on MsPacman", list(speeds.values()))
    for algorithm, count in plan.training_steps.items():
        found: dict[str, list[float]] = {subject: [] for subject in plan.training_subjects}
        networks = set()
        for round_number in tqdm(range(plan.training_rounds), algorithm, leave=False, disable=None):
            # Each process trains only once, so that nothing from an earlier training affects the networks.
            order = plan.training_subjects[:: 1 if round_number % 2 == 0 else -1]
            with Workers(order, algorithm, KEEP_MEMORY) as workers:
                for subject, runs in workers.in_turn(1, "train", algorithm=algorithm, steps=count).items():
                    found[subject].append(runs[0]["speed"])
                    networks.add(runs[0]["network"])
                table.failures |= workers.failures
        for subject, values in found.items():
            table.put(subject, speeds[algorithm], values or Absent("failed"))
        same = "bit-identical" if len(networks) == 1 else "**DIFFERENT**"
        table.notes.append(f"{algorithm}, {count:,} steps: the trained networks of all runs are {same}.")
    return table


def train(algorithm: str, subject: str, steps: int) -> dict[str, Any]:
    """Train in this process. A short warm-up, in which kernels are compiled, is not timed.

    It ends before ``auto`` first tries other methods, so the time that this takes, if it does, counts: as in training.
    """
    from sb3_extra_buffers.measure.training import hash_of

    model = make_model(algorithm, compressed=subject != "sb3")
    model.learn(steps // 10)
    counted_from = model.num_timesteps
    began = time.perf_counter()
    model.learn(steps, reset_num_timesteps=False)
    speed = (model.num_timesteps - counted_from) / (time.perf_counter() - began)
    return {"speed": speed, "network": hash_of(model.policy)}


class BufferClock:
    """Counts the seconds that a model spends in the methods of its buffer."""

    def __init__(self, model: BaseAlgorithm) -> None:
        self.seconds = 0.0
        buffer: Any = model.replay_buffer if isinstance(model, DQN) else getattr(model, "rollout_buffer", None)
        for name in ("add", "sample", "reset", "compute_returns_and_advantage"):
            if hasattr(buffer, name):
                setattr(buffer, name, self._timed(getattr(buffer, name)))
        if hasattr(buffer, "get"):
            buffer.get = self._timed_batches(buffer.get)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return call

    def _timed_batches(self, get: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def batches(*args: Any) -> Iterator[Any]:
            following = self._timed(get(*args).__next__)
            while True:
                try:
                    yield following()
                except StopIteration:
                    return

        return batches


def make_model(algorithm: str, compressed: bool) -> BaseAlgorithm:
    # Imported here: this module is also imported where version 0.5, with the same import name, is installed.
    from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer

    common: dict[str, Any] = {"seed": 0, "device": "cpu"}
    if algorithm == "DQN":
        common |= {"replay_buffer_class": CompressedReplayBuffer} if compressed else {}
        return DQN("CnnPolicy", make_env(GAME, 4, seed=0), buffer_size=20_000, learning_starts=100, **common)
    common |= {"rollout_buffer_class": CompressedRolloutBuffer} if compressed else {}
    return PPO("CnnPolicy", make_env(GAME, 8, seed=0), n_steps=128, batch_size=256, n_epochs=4, **common)
