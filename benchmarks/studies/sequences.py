"""Batches of 16 sequences of 64 Atari frames: speed and memory, compared with TorchRL's ``SliceSampler``.

    python -m benchmarks.studies.sequences

Both buffers hold the same steps of a recorded game. TorchRL's has observations, actions, rewards and dones in a
``LazyTensorStorage``, and no next observations. Each buffer is in a process of its own, and they take turns. Memory is
the growth of resident memory while the buffer is filled. A small buffer is filled and sampled first, so that code that
is loaded on first use does not count.

With ``--device cuda``, batches go to a GPU, and TorchRL is left out. Compared are the buffer in host memory, the one on
the GPU, and indexing plain tensors on the GPU, which is the least that any buffer there has to do. Times of ``sample``
include the wait for the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from benchmarks.peers import prepare, python_for
from benchmarks.recordings import Recording, load_recording
from benchmarks.report import markdown_table
from benchmarks.worker import give_back_memory, resident_bytes

ROOT = Path(__file__).parents[2]
OURS, TORCHRL = "CompressedSequenceReplayBuffer", "TorchRL"
ON_DEVICE, DENSE = "GpuSequenceReplayBuffer", "plain tensors on the device"
SEQUENCES, LENGTH = 16, 64
FASTER, SMALLER = 5, 15
"""How many times faster and smaller than TorchRL's buffer ours must be."""
WARM_UP_STEPS = 1000

Sample = Callable[[], Any]


class Step(NamedTuple):
    obs: npt.NDArray[np.uint8]
    next_obs: npt.NDArray[np.uint8]
    action: int
    reward: float
    is_last: bool


def steps_of(recording: Recording, stack: int, n_steps: int) -> Iterator[Step]:
    """The steps of one environment after the other, as one long stream."""
    for env in range(recording.n_envs):
        frames: list[npt.NDArray[np.uint8]] = []
        before: Step | None = None
        for step, newest in enumerate(recording.frames()):
            if step == n_steps:
                break
            frame = newest[env].transpose(2, 0, 1).copy()
            frames = [*frames[1:], frame] if frames else [frame] * stack
            obs = frames[0] if stack == 1 else np.concatenate(frames)
            if before is not None:
                yield before._replace(next_obs=obs)
            is_last = bool(recording.dones[step, env]) or step == n_steps - 1
            action, reward = int(recording.actions[step, env]), float(recording.rewards[step, env])
            before = Step(obs, obs, action, reward, is_last)
            frames = [] if is_last else frames
        if before is not None:
            yield before


def new_buffer(name: str, size: int, stack: int, device: str) -> Any:
    from gymnasium import spaces

    import sb3_extra_buffers

    images = spaces.Box(0, 255, (stack, 84, 84), np.uint8)
    buffer_class = getattr(sb3_extra_buffers, name)
    return buffer_class(size, images, spaces.Discrete(18), device=device, length=LENGTH, at_episode_end="stop")


def fill_ours(steps: Iterator[Step], size: int, stack: int) -> Sample:
    buffer = new_buffer(OURS, size, stack, "cpu")
    for step in steps:
        buffer.add(*step, [{}])
    return lambda: buffer.sample(SEQUENCES)


def fill_torchrl(steps: Iterator[Step], size: int, stack: int) -> Sample:
    import torch as th
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler

    sampler = SliceSampler(slice_len=LENGTH, end_key="done", strict_length=True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler, batch_size=SEQUENCES * LENGTH)
    for step in steps:
        fields = {
            "obs": th.from_numpy(step.obs)[None],
            "action": th.tensor([step.action]),
            "reward": th.tensor([step.reward]),
            "done": th.tensor([[step.is_last]]),
        }
        buffer.extend(TensorDict(fields, batch_size=[1]))
    return lambda: buffer.sample()


def work(subject: str, game: str, n_steps: int, stack: int) -> None:
    """Run in a worker process: fill a buffer, print how much memory it takes, and sample on request."""
    import torch as th

    fill = fill_ours if subject == OURS else fill_torchrl
    recording = load_recording(game, n_steps)
    small = fill(steps_of(recording, stack, WARM_UP_STEPS), recording.n_envs * WARM_UP_STEPS, stack)
    for _ in range(5):
        small()
    del small
    give_back_memory()
    th.set_num_threads(2)
    before = resident_bytes()
    sample = fill(steps_of(recording, stack, n_steps), recording.n_envs * n_steps, stack)
    print(resident_bytes() - before, flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            sample()
        began = time.perf_counter()
        sample()
        print(time.perf_counter() - began, flush=True)


class Dense:
    """Steps in plain tensors on a device. Its sequences may cross the end of an episode."""

    def __init__(self, size: int, stack: int, device: str) -> None:
        import torch as th

        self.device, self.n = device, 0
        shapes = {"obs": ((stack, 84, 84), th.uint8), "action": ((1,), th.int64), "reward": ((), th.float32)}
        shapes["done"] = (), th.bool
        self.fields = {
            name: th.empty((size, *shape), dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()
        }

    def add(self, obs: Any, next_obs: Any, action: int, reward: float, done: bool, infos: Any) -> None:
        import torch as th

        self.fields["obs"][self.n] = th.from_numpy(obs).to(self.device)
        for name, value in (("action", action), ("reward", reward), ("done", done)):
            self.fields[name][self.n] = value
        self.n += 1

    def sample(self, n_sequences: int) -> Any:
        import torch as th

        starts = np.random.randint(0, self.n - LENGTH + 1, size=n_sequences)
        rows = th.from_numpy(starts[:, None] + np.arange(LENGTH)).to(self.device)
        return {name: field[rows] for name, field in self.fields.items()}


def measure_on_device(recording: Recording, n_steps: int, stack: int, repeats: int, device: str) -> dict[str, Any]:
    """Milliseconds of a batch, microseconds of an added step, and bytes per step, for each subject."""
    import torch as th

    def waited(work: Callable[[], Any]) -> float:
        began = time.perf_counter()
        work()
        if device.startswith("cuda"):
            th.cuda.synchronize()
        return time.perf_counter() - began

    size = recording.n_envs * n_steps
    subjects = {name: new_buffer(name, size, stack, device) for name in (OURS, ON_DEVICE)} | {
        DENSE: Dense(size, stack, device)
    }
    adding: dict[str, list[float]] = {name: [] for name in subjects}
    sampling: dict[str, list[float]] = {name: [] for name in subjects}
    for step in tqdm(steps_of(recording, stack, n_steps), "add", total=size):
        for name, buffer in subjects.items():
            began = time.perf_counter()
            buffer.add(*step, [{}])
            adding[name].append(time.perf_counter() - began)
    compare(subjects[OURS], subjects[ON_DEVICE])
    for number in tqdm(range(repeats + 10), "sample"):
        for name, buffer in subjects.items():
            spent = waited(lambda buffer=buffer: buffer.sample(SEQUENCES))  # type: ignore[misc]
            if number >= 10:  # the first calls compile kernels
                sampling[name].append(spent)
    stored = {
        OURS: subjects[OURS].memory_usage().total,
        ON_DEVICE: subjects[ON_DEVICE].device_bytes,
        DENSE: sum(field.nbytes for field in subjects[DENSE].fields.values()),
    }
    return {
        name: {
            "sample, median, ms": 1e3 * statistics.median(sampling[name]),
            "sample, 10th percentile, ms": 1e3 * statistics.quantiles(sampling[name], n=10)[0],
            "add, median, µs": 1e6 * statistics.median(adding[name]),
            "bytes per step": stored[name] / size,
        }
        for name in subjects
    }


def compare(*buffers: Any) -> None:
    """Batches under the same seed must be the same."""
    import torch as th

    batches = []
    for buffer in buffers:
        np.random.seed(0)
        batches.append(buffer.sample(SEQUENCES)._replace(positions=None, latents=None, next_observations=None))
    if not all(th.equal(one, other) for one, other in zip(*batches, strict=True) if one is not None):
        raise RuntimeError("Batches of the two buffers differ.")


def print_on_device(results: dict[str, Any]) -> None:
    columns = list(next(iter(results.values())))
    rows = [(name, *(f"{values[column]:,.2f}" for column in columns)) for name, values in results.items()]
    print("\n" + markdown_table(("", *columns), rows))


def start(subject: str, options: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONWARNINGS": "ignore"}
    if subject == TORCHRL:
        environment.pop("PYTHONPATH", None)
    python = python_for("others" if subject == TORCHRL else None)
    return subprocess.Popen(
        [str(python), "-m", "benchmarks.studies.sequences", "--worker", subject, *options],
        cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def ask(worker: subprocess.Popen[str], line: str | None) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    if line is not None:
        worker.stdin.write(line + "\n")
        worker.stdin.flush()
    while answer := worker.stdout.readline():
        try:
            return float(answer)
        except ValueError:  # TorchRL logs to stdout
            continue
    raise RuntimeError(f"A worker ended with {worker.wait()}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="mspacman")
    parser.add_argument(
        "--steps", type=int, help="steps of each of four environments (default: 25,000, on a device 8,192)"
    )
    parser.add_argument("--stack", type=int, default=1, help="frames per observation")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--device", default="cpu", help="where batches go (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--worker", choices=(OURS, TORCHRL), help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.steps = given.steps or (25_000 if given.device == "cpu" else 8_192)
    if given.device != "cpu":
        recording = load_recording(given.game, given.steps)
        found = measure_on_device(recording, given.steps, given.stack, given.repeats, given.device)
        print(f"\n{4 * given.steps:,} steps of {given.game}, {SEQUENCES} x {LENGTH}, {given.stack} frames each")
        print_on_device(found)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    if given.worker:
        work(given.worker, given.game, given.steps, given.stack)
        return
    prepare("others")
    options = [f"--game={given.game}", f"--steps={given.steps}", f"--stack={given.stack}"]
    workers = {subject: start(subject, options) for subject in (OURS, TORCHRL)}
    memory = {subject: ask(worker, None) for subject, worker in workers.items()}
    spent: dict[str, list[float]] = {subject: [] for subject in workers}
    for _ in tqdm(range(given.repeats), "measure"):
        for subject, worker in workers.items():
            spent[subject].append(ask(worker, "1"))
    for worker in workers.values():
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()
    times = {subject: 1e3 * statistics.median(values) for subject, values in spent.items()}
    best = {subject: 1e3 * statistics.quantiles(values, n=10)[0] for subject, values in spent.items()}
    n = 4 * given.steps
    print(  # as a table for the documentation
        f"\n{n:,} steps of {given.game}, {SEQUENCES} sequences of {LENGTH} steps, {given.stack} frames each\n"
    )
    rows = []
    for subject in workers:
        size = memory[subject]
        milliseconds = f"{times[subject]:.2f} ms", f"{best[subject]:.2f} ms"
        rows.append((subject, *milliseconds, f"{size / 1e6:,.0f} MB", f"{size / n:,.0f}"))
    print(markdown_table(("", "median", "10th percentile", "memory", "bytes per step"), rows))
    faster, smaller = times[TORCHRL] / times[OURS], memory[TORCHRL] / memory[OURS]
    print(f"\n{faster:.1f} times faster (at least {FASTER}), {smaller:.1f} times smaller (at least {SMALLER})")
    if given.json:
        result = {"steps": n, "game": given.game, "stack": given.stack, "ms": times, "ms_10": best, "bytes": memory}
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    if faster < FASTER or smaller < SMALLER:
        sys.exit("Too slow, or too large.")


if __name__ == "__main__":
    main()
