"""What do priorities cost in a buffer of a million transitions, compared with those of cpprb and TorchRL?

    pip install cpprb torchrl
    python -m benchmarks.studies.prioritized

A step is ``sample(256)`` and, in prioritized buffers, updating the priorities of the batch. All buffers hold the same
transitions and priorities, and take turns in one process. The table shows medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from tqdm import tqdm

from benchmarks.report import markdown_table
from sb3_extra_buffers.compressed import CompressedPrioritizedReplayBuffer, CompressedReplayBuffer

PLAIN, PRIORITIZED = "CompressedReplayBuffer", "CompressedPrioritizedReplayBuffer"
PEERS = ("cpprb", "torchrl")
LIMIT = 1500.0
"""The most that priorities may add to a step, in microseconds."""
BATCH_SIZE = 256
N_ENVS = 100
OBSERVATION_SPACE = spaces.Box(-np.inf, np.inf, (8,), np.float32)
ACTION_SPACE = spaces.Discrete(4)
ALPHA, BETA = 0.6, 0.4

Batch = dict[str, npt.NDArray[Any]]


def batches(size: int) -> Iterator[Batch]:
    """The transitions of :data:`N_ENVS` random walks, one step of all of them at a time."""
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(N_ENVS, *OBSERVATION_SPACE.shape)).astype(np.float32)
    for _ in tqdm(range(size // N_ENVS), "fill", unit="step"):
        next_obs = obs + rng.normal(size=obs.shape).astype(np.float32)
        yield {
            "obs": obs,
            "next_obs": next_obs,
            "act": rng.integers(ACTION_SPACE.n, size=(N_ENVS, 1)),
            "rew": rng.normal(size=(N_ENVS, 1)).astype(np.float32),
            "done": (rng.random((N_ENVS, 1)) < 0.01).astype(np.float32),
        }
        obs = next_obs


class Sb3Subject:
    """A buffer with SB3's interface, and priorities if it has any."""

    def __init__(self, cls: type[ReplayBuffer], size: int, **kwargs: Any) -> None:
        self.buffer = cls(size, OBSERVATION_SPACE, ACTION_SPACE, "cpu", N_ENVS, **kwargs)

    def add(self, batch: Batch) -> None:
        reward, done = batch["rew"][:, 0], batch["done"][:, 0]
        self.buffer.add(batch["obs"], batch["next_obs"], batch["act"], reward, done, [{}] * N_ENVS)

    def set_all(self, errors: npt.NDArray[np.float64]) -> None:
        if isinstance(self.buffer, CompressedPrioritizedReplayBuffer):
            self.buffer.update_priorities(np.arange(len(errors)), errors)

    def sample(self) -> Any:
        return self.buffer.sample(BATCH_SIZE)

    def update(self, batch: Any, errors: npt.NDArray[np.float64]) -> None:
        if isinstance(self.buffer, CompressedPrioritizedReplayBuffer):
            self.buffer.update_priorities(batch.indices, errors)


class CpprbSubject:
    def __init__(self, size: int) -> None:
        from cpprb import PrioritizedReplayBuffer

        shape = OBSERVATION_SPACE.shape
        fields = {
            "obs": {"shape": shape},
            "next_obs": {"shape": shape},
            "act": {"dtype": np.int64},
            "rew": {},
            "done": {},
        }
        self.buffer = PrioritizedReplayBuffer(size, fields, alpha=ALPHA)

    def add(self, batch: Batch) -> None:
        self.buffer.add(**batch)

    def set_all(self, errors: npt.NDArray[np.float64]) -> None:
        self.buffer.update_priorities(np.arange(len(errors)), errors)

    def sample(self) -> Any:
        return self.buffer.sample(BATCH_SIZE, beta=BETA)

    def update(self, batch: Any, errors: npt.NDArray[np.float64]) -> None:
        self.buffer.update_priorities(batch["indexes"], errors)


class TorchrlSubject:
    def __init__(self, size: int) -> None:
        from torchrl.data import LazyTensorStorage, PrioritizedReplayBuffer

        self.buffer = PrioritizedReplayBuffer(
            alpha=ALPHA,
            beta=BETA,
            eps=1e-6,
            storage=LazyTensorStorage(size),
            batch_size=BATCH_SIZE,
            collate_fn=lambda x: x,
        )

    def add(self, batch: Batch) -> None:
        from tensordict import TensorDict

        fields = {key: th.from_numpy(value) for key, value in batch.items()}
        self.buffer.extend(TensorDict(fields, batch_size=[N_ENVS]))

    def set_all(self, errors: npt.NDArray[np.float64]) -> None:
        self.buffer.update_priority(th.arange(len(errors)), th.from_numpy(errors).float())

    def sample(self) -> Any:
        return self.buffer.sample(return_info=True)

    def update(self, batch: Any, errors: npt.NDArray[np.float64]) -> None:
        _, info = batch
        self.buffer.update_priority(info["index"], th.from_numpy(errors).float())


def make_subjects(size: int, method: str, with_peers: bool) -> dict[str, Any]:
    options = {"compression_method": method}
    subjects: dict[str, Any] = {
        "SB3 ReplayBuffer": Sb3Subject(ReplayBuffer, size),
        PLAIN: Sb3Subject(CompressedReplayBuffer, size, **options),
        PRIORITIZED: Sb3Subject(CompressedPrioritizedReplayBuffer, size, alpha=ALPHA, beta=BETA, **options),
    }
    if with_peers:
        subjects |= {"cpprb": CpprbSubject(size), "TorchRL": TorchrlSubject(size)}
    return subjects


def measure(subjects: dict[str, Any], size: int, repeats: int) -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(1)
    for batch in batches(size):
        for subject in subjects.values():
            subject.add(batch)
    errors = rng.exponential(size=size // N_ENVS * N_ENVS)
    for subject in subjects.values():
        subject.set_all(errors)
    spent: dict[str, dict[str, list[float]]] = {name: {"sample": [], "update": []} for name in subjects}
    order = list(subjects)
    for _ in tqdm(range(repeats), "measure"):
        order.append(order.pop(0))
        errors = rng.exponential(size=BATCH_SIZE)
        for name in order:
            began = time.perf_counter()
            drawn = subjects[name].sample()
            sampled = time.perf_counter()
            subjects[name].update(drawn, errors)
            spent[name]["update"].append(1e6 * (time.perf_counter() - sampled))
            spent[name]["sample"].append(1e6 * (sampled - began))
    results = {name: {kind: statistics.median(times) for kind, times in found.items()} for name, found in spent.items()}
    return {name: {**row, "both": row["sample"] + row["update"]} for name, row in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1_000_000, help="transitions in each buffer")
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--method", default="none", help="how the compressed buffers store observations")
    parser.add_argument("--no-peers", action="store_true", help="leave out cpprb and TorchRL")
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    missing = [] if arguments.no_peers else [name for name in PEERS if find_spec(name) is None]
    if missing:
        sys.exit(f"Not installed: {', '.join(missing)}. Install cpprb and torchrl, or leave them out with --no-peers.")
    subjects = make_subjects(arguments.size, arguments.method, not arguments.no_peers)
    results = measure(subjects, arguments.size, arguments.repeats)
    print(f"\n{arguments.size:,} transitions, batches of {BATCH_SIZE}, microseconds\n")
    rows = [(name, *(f"{row[kind]:,.0f}" for kind in ("sample", "update", "both"))) for name, row in results.items()]
    print(markdown_table(("", "sample", "update priorities", "both"), rows))
    beyond = results[PRIORITIZED]["both"] - results[PLAIN]["sample"]
    print(f"\nPriorities cost {beyond:,.0f} µs per step; the limit is {LIMIT:,.0f} µs.")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if beyond > LIMIT:
        sys.exit("Priorities cost too much.")


if __name__ == "__main__":
    main()
