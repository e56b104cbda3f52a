"""A recurrent DQN on recorded Atari frames: sequences and frames per second, compared with plain arrays.

    python -m benchmarks.studies.recurrent

The network, the loss and the burn-in are those of ``examples/example_train_recurrent.py``. Both buffers hold the same
steps, without a frame stack, and their calls take turns. Plain arrays are read with one array of indices, the fastest
way in NumPy. They sample windows without regard to episodes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces

from benchmarks.recordings import load_recording
from benchmarks.report import markdown_table
from benchmarks.studies.sequences import Step, steps_of
from sb3_extra_buffers import CompressedSequenceReplayBuffer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import example_train_recurrent as example

OURS, PLAIN = "CompressedSequenceReplayBuffer", "plain arrays"
Sample = Callable[[], Any]


class PlainSequences:
    """What users write without a library: one array for each field."""

    def __init__(self, size: int, length: int, batch: int) -> None:
        self.observations = np.zeros((size, 1, 84, 84), np.uint8)
        self.actions = np.zeros((size, 1), np.int64)
        self.rewards = np.zeros(size, np.float32)
        self.is_first = np.zeros(size, np.bool_)
        self.terminals = np.zeros(size, np.bool_)
        self.state = np.zeros((size, example.HIDDEN), np.float32)
        self.size, self.length, self.batch = size, length, batch

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))

    def fill(self, steps: Iterator[Step]) -> None:
        for i, step in enumerate(islice(steps, self.size)):
            self.observations[i], self.actions[i], self.rewards[i] = step.obs, step.action, step.reward
            self.terminals[i] = step.is_last
            self.is_first[i] = i == 0 or self.terminals[i - 1]

    def sample(self) -> Any:
        anchors = np.random.randint(0, self.size - self.length, self.batch)
        places = np.arange(self.length)[:, None] + anchors
        fields = {
            name: th.from_numpy(getattr(self, name)[places])
            for name in ("observations", "actions", "rewards", "is_first", "terminals")
        }
        mask = th.ones(self.length, self.batch, dtype=th.bool)
        return SimpleNamespace(**fields, mask=mask, latents={"state": th.from_numpy(self.state[places])}, weights=1.0)


def our_sample(steps: Iterator[Step], size: int, given: argparse.Namespace) -> tuple[Any, Sample]:
    buffer = CompressedSequenceReplayBuffer(
        size,
        spaces.Box(0, 255, (1, 84, 84), np.uint8),
        spaces.Discrete(18),
        device="cpu",
        length=given.length,
        burn_in=given.burn_in,
        bootstrap_steps=1,
        latents={"state": (example.HIDDEN,)},
        time_first=True,
        at_episode_end="cross",
    )
    state = np.zeros((1, example.HIDDEN), np.float32)
    for step in islice(steps, size):
        buffer.add(*step, [{}], latents={"state": state})

    def sample() -> Any:
        found = buffer.sample(given.batch)
        fields = {
            name: getattr(found, name) for name in ("observations", "actions", "rewards", "is_first", "terminals")
        }
        return SimpleNamespace(**fields, mask=found.mask, latents=found.latents, weights=1.0)

    return buffer, sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="mspacman")
    parser.add_argument("--steps", type=int, default=6_000, help="steps of each of four environments")
    parser.add_argument("--length", type=int, default=40, help="steps to learn from, per sequence")
    parser.add_argument("--burn-in", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="sequences in a batch")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--updates", type=int, default=5, help="number of batches that are also learned from")
    parser.add_argument("--json", type=Path, help="also write the results here")
    given = parser.parse_args()
    example.BURN_IN = given.burn_in
    recording = load_recording(given.game, given.steps)
    size, total = recording.n_envs * given.steps, given.length + given.burn_in + 1
    buffer, sample = our_sample(steps_of(recording, 1, given.steps), size, given)
    plain = PlainSequences(size, total, given.batch)
    plain.fill(steps_of(recording, 1, given.steps))
    memory = {OURS: buffer.memory_usage().total, PLAIN: plain.nbytes}
    network, target = (example.QNetwork(spaces.Box(0, 255, (1, 84, 84), np.uint8), 18, False) for _ in range(2))
    sampled: dict[str, list[float]] = {OURS: [], PLAIN: []}
    learned: dict[str, list[float]] = {OURS: [], PLAIN: []}
    for i in range(given.repeats):
        for name, draw in ((OURS, sample), (PLAIN, plain.sample)):
            draw()
            began = time.perf_counter()
            batch = draw()
            sampled[name].append(time.perf_counter() - began)
            if i < given.updates:
                loss, *_ = example.learn(batch, network, target)
                th.autograd.backward(loss)
                learned[name].append(time.perf_counter() - began)
    print(f"\n{size:,} steps of {given.game}; batches of {given.batch} sequences of {total} steps\n")
    results, rows = {}, []
    for name in memory:
        rates = [given.batch / statistics.quantiles(times[name], n=10)[0] for times in (sampled, learned)]
        results[name] = {"sequences_per_s": rates[0], "learned_sequences_per_s": rates[1], "bytes": memory[name]}
        cells = chain(*((f"{rate:,.0f} sequences/s", f"{rate * total:,.0f} frames/s") for rate in rates))
        rows.append((f"`{name}`", *cells, f"{memory[name] / 1e6:,.0f} MB"))
    print(markdown_table(("", "sampling", "frames", "with learning", "frames", "memory"), rows))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
