"""Compare buffers on a GPU with SB3's buffer in host memory, on a recording of MsPacman.

    python -m benchmarks.studies.gpu --json results.json

All buffers take turns, so that they see the same machine load. Times are wall times through SB3's interface. Those with
``sample`` include the wait for the device. "kernel" is the device's time alone to rebuild a batch. "dense index" is not
a buffer: it indexes two tensors on the device, which is the least that any buffer there has to do. Subjects that end in
"from device" get observations that are on the device already. "delta x2" has two frames per record instead of three.
``zstd`` keeps observations in host memory. Without a GPU, ``--device cpu`` keeps everything there.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer
from tqdm import tqdm

from benchmarks.recordings import Recording, Transition, load_recording, transitions
from benchmarks.report import markdown_table
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer
from sb3_extra_buffers.gpu_buffers.kernels import ObservationBatch, uses_triton
from sb3_extra_buffers.gpu_buffers.observation_store import PackedObservationStore
from sb3_extra_buffers.gpu_buffers.transfer import Places, upload

SB3, DENSE = "SB3", "dense index"
FROM_DEVICE = " from device"
METHODS = ("delta", "delta from device", "rle", "none")
BATCH_SIZES = (32, 256)
ROLLOUT_STEPS, ROLLOUT_ENVS, EPOCHS = 128, 64, 4
RECORDED_STEPS = 8_192
"""Steps of each of 4 environments. They are played repeatedly."""
FEWER_STEPS = 3_000
"""The most steps in buffers whose speed does not depend on how much they store."""
TURN = 20
"""How many times one buffer is measured before the next one's turn."""
WARM_UP = 300
"""Steps that do not count, in which kernels are compiled and a buffer detects the frame stack."""

Results = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--steps", type=int, default=50_000, help="steps of each of 4 environments (default: %(default)s)"
    )
    parser.add_argument("--methods", default=",".join(METHODS), help="separated by commas (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=400, help="samples per batch size (default: %(default)s)")
    parser.add_argument("--growth", type=float, default=5, help="GiB to which a buffer grows (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    device = th.device(arguments.device)
    recording = load_recording("mspacman", RECORDED_STEPS)

    subjects = [
        Subject(
            name,
            recording,
            arguments.steps if name in ("delta", "delta x2") else min(FEWER_STEPS, arguments.steps),
            device,
        )
        for name in (SB3, DENSE, *arguments.methods.split(","))
    ]
    gc.collect()
    gc.freeze()  # the garbage collector need not search what was imported
    measure_add(subjects, recording, device)
    measure_sample(subjects, arguments.repeats)
    measure_both(subjects, recording, device, arguments.repeats)
    results: Results = {subject.name: subject.results() for subject in subjects}
    del subjects
    for name in (SB3, "delta"):
        results[name]["rollout, 4 epochs, µs"] = measure_rollout(name, recording, device)
    print(
        f"\nMsPacman, {4 * arguments.steps:,} transitions ({4 * min(FEWER_STEPS, arguments.steps):,} but for delta)\n"
    )
    print(table(results))
    if device.type == "cuda" and arguments.growth:
        results["growth"] = grown = measure_growth(arguments.growth, device)
        print("\nMemory while a buffer grows:", *(f"{name} {value:,.2f}" for name, value in grown.items()), sep="\n  ")
    if arguments.json:
        name = th.cuda.get_device_name() if device.type == "cuda" else "CPU"
        versions = {"torch": th.__version__, "device": name, "triton": uses_triton(device)}
        arguments.json.write_text(json.dumps({"versions": versions, "results": results}, indent=1) + "\n")


class Subject:
    """A buffer, and the times that were measured with it."""

    def __init__(self, name: str, recording: Recording, steps: int, device: th.device) -> None:
        self.name = name
        self.steps = steps
        self.device = device
        self.times: dict[str, list[float]] = {}
        self.buffer: Any
        size, n_envs = steps * recording.n_envs, recording.n_envs
        space, actions = recording.observation_space, recording.action_space
        if name == DENSE:
            self.buffer = Dense(steps, n_envs, math.prod(space.shape), device)
        elif name == SB3:
            self.buffer = ReplayBuffer(size, space, actions, device, n_envs)
        else:
            method, _, group = name.removesuffix(FROM_DEVICE).partition(" x")
            self.buffer = GpuReplayBuffer(
                size, space, actions, device, n_envs, compression_method=method, frame_stack=recording.stack,
                compression_kwargs={"frames_per_record": int(group)} if group else None,
            )  # fmt: skip

    def time(self, what: str, *work: Any, wait: bool = True) -> None:
        """Call functions one after the other, and record how long all of them take."""
        began = time.perf_counter()
        for call in work:
            call()
        if wait:
            _synchronize(self.device)
        self.times.setdefault(what, []).append(1e6 * (time.perf_counter() - began))

    def results(self) -> dict[str, float]:
        found = {}
        for what, times in self.times.items():
            ordered = sorted(times)
            found[f"{what}, µs"] = statistics.fmean(ordered)
            found[f"{what}, median, µs"] = statistics.median(ordered)
            found[f"{what}, 99th percentile, µs"] = ordered[len(ordered) * 99 // 100]
        if isinstance(self.buffer, GpuReplayBuffer):
            n_transitions = self.buffer.buffer_size * self.buffer.n_envs
            found["device bytes per transition"] = self.buffer.device_bytes / n_transitions
            (store,) = self.buffer._stores.values()
            if isinstance(store, PackedObservationStore) and store.device_frames and self.device.type == "cuda":
                found["of these for reference frames"] = store.codec.reference_bytes / n_transitions
                found["kernel, batch of 256, µs"] = kernel_time(self.buffer, store)
        return found


class Dense:
    """Two tensors on the device, indexed with rows that the host draws, as SB3 does."""

    def __init__(self, steps: int, n_envs: int, row_bytes: int, device: th.device) -> None:
        self._sizes = steps, n_envs
        self._device = device
        self._columns = [th.zeros((steps * n_envs, row_bytes), dtype=th.uint8, device=device) for _ in range(2)]

    def sample(self, batch_size: int) -> list[th.Tensor]:
        steps, n_envs = self._sizes
        rows = np.random.randint(0, steps, size=batch_size) * n_envs + np.random.randint(0, n_envs, size=batch_size)
        on_device = upload(rows, self._device)
        return [column[on_device] for column in self._columns]


def measure_add(subjects: list[Subject], recording: Recording, device: th.device) -> None:
    """Fill all buffers. Like training, this does not wait for the device."""
    adding = [subject for subject in subjects if subject.name != DENSE]
    most = max(subject.steps for subject in adding)
    for step, transition in enumerate(tqdm(islice(again(recording), most), total=most, unit="step", mininterval=5)):
        adding = [subject for subject in adding if step < subject.steps]
        if any(subject.name.endswith(FROM_DEVICE) for subject in adding):
            on_device = to_device(transition, device)
        for subject in adding:
            add = partial(subject.buffer.add, *(on_device if subject.name.endswith(FROM_DEVICE) else transition))
            subject.time("add" if step >= WARM_UP else "warm-up", add, wait=False)
            if subject.name == SB3:
                _synchronize(device)
    for subject in subjects:
        subject.times.pop("warm-up", None)


def measure_sample(subjects: list[Subject], repeats: int) -> None:
    for batch_size in BATCH_SIZES:
        for turn in range(1 + repeats // TURN):
            for subject in subjects:
                np.random.seed(turn)
                for _ in range(TURN):
                    name = f"sample({batch_size})" if turn else "warm-up"
                    subject.time(name, partial(subject.buffer.sample, batch_size))


def measure_both(subjects: list[Subject], recording: Recording, device: th.device, repeats: int) -> None:
    """Time an ``add`` and a ``sample`` together, as in training DQN."""
    played = again(recording)
    for batch_size in BATCH_SIZES:
        for turn in range(1 + repeats // TURN):
            name = f"add, then sample({batch_size})" if turn else "warm-up"
            batch = [(transition, to_device(transition, device)) for transition in islice(played, TURN)]
            for subject in subjects:
                for pair in batch if subject.name != DENSE else []:
                    add = partial(subject.buffer.add, *pair[subject.name.endswith(FROM_DEVICE)])
                    sample = partial(subject.buffer.sample, batch_size)
                    subject.time(name, add, sample)
    for subject in subjects:
        subject.times.pop("warm-up", None)


def measure_rollout(name: str, recording: Recording, device: th.device) -> float:
    """Microseconds to read a rollout for four epochs. Filling it does not count."""
    space, actions = recording.observation_space, spaces.Discrete(9)
    kind = RolloutBuffer if name == SB3 else GpuRolloutBuffer
    buffer = kind(ROLLOUT_STEPS, space, actions, device, n_envs=ROLLOUT_ENVS)
    zeros, times = np.zeros(ROLLOUT_ENVS, np.float32), []
    for _ in range(3):
        buffer.reset()
        for obs in _many_environments(recording):
            buffer.add(obs, zeros[:, None], zeros, zeros, th.tensor(zeros), th.tensor(zeros))
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(EPOCHS):
            for batch in buffer.get(256):
                assert batch.observations.device.type == device.type
        _synchronize(device)
        times.append(1e6 * (time.perf_counter() - began))
    return min(times)


def measure_growth(gib: float, device: th.device) -> dict[str, float]:
    """The GPU memory of a growing buffer, relative to the bytes it stores. It stores noise, which does not compress."""
    gc.collect()
    th.cuda.empty_cache()
    n_envs, shape = 256, (4, 84, 84)
    n_steps = int(gib * 2**30) // (n_envs * math.prod(shape))
    zeros = np.zeros(n_envs, np.float32)
    noise = th.randint(256, (n_envs, *shape), dtype=th.uint8, device=device)
    _synchronize(device)
    free = th.cuda.mem_get_info(device)[0]
    buffer = GpuReplayBuffer(
        n_steps * n_envs, spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(9), device, n_envs,
        compression_method="delta", frame_stack=1,
    )  # fmt: skip
    ratios = []
    for step in range(n_steps):
        before, noise = noise, th.randint_like(noise, 256)
        buffer.add(before, noise, zeros, zeros, zeros, [{}] * n_envs)
        if step > n_steps // 10 and step % 10 == 0:
            _synchronize(device)
            stored = (step + 2) * n_envs * math.prod(shape)
            ratios.append((free - th.cuda.mem_get_info(device)[0]) / stored)
    stored = (n_steps + 1) * n_envs * math.prod(shape)
    taken = free - th.cuda.mem_get_info(device)[0]
    return {
        "GiB stored": stored / 2**30,
        "taken / stored": taken / stored,
        "taken / stored, at most": max(*ratios, taken / stored),
        "torch reserved / stored": th.cuda.memory_reserved() / stored,
    }


def again(recording: Recording) -> Iterator[Transition]:
    """Play the recording in an endless loop."""
    while True:
        yield from transitions(recording)


def _many_environments(recording: Recording) -> Iterator[Any]:
    """Observations of more environments than were recorded: later parts of the recording act as the others."""
    copies = ROLLOUT_ENVS // recording.n_envs
    seen = [transition.obs for transition in islice(transitions(recording), ROLLOUT_STEPS * copies)]
    for step in range(ROLLOUT_STEPS):
        parts = [seen[copy * ROLLOUT_STEPS + step].transpose(0, 2, 3, 1) for copy in range(copies)]
        yield np.concatenate(parts).transpose(0, 3, 1, 2)


def to_device(transition: Transition, device: th.device) -> Any:
    """The transition, with its observations on the device."""
    obs, next_obs, *rest = transition
    found = [upload(np.ascontiguousarray(part), device) for part in (obs, next_obs)]
    _synchronize(device)
    return (*found, *rest)


def kernel_time(buffer: GpuReplayBuffer, store: PackedObservationStore, batch_size: int = 256, n: int = 20) -> float:
    """Microseconds of device time to rebuild a batch. A CUDA graph of many batches hides the cost of launches."""
    frames = store.device_frames
    assert frames is not None
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(n):
        slots = rng.integers(buffer.size(), size=batch_size)
        places = Places([slots], rng.integers(buffer.n_envs, size=batch_size), store.device)
        shape = (batch_size, store.layout.stack, store.layout.frame.nbytes)
        outs = [th.empty(shape, dtype=th.uint8, device=store.device) for _ in range(2)]
        batches.append(ObservationBatch(places, frames.ends, outs))
    for batch in batches:
        frames.launch(batch)
    th.cuda.synchronize()
    graph = th.cuda.CUDAGraph()
    with th.cuda.graph(graph):
        for batch in batches:
            frames.launch(batch)
    times = []
    for _ in range(30):
        start, end = (th.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / n)
    return float(statistics.median(times))


def _synchronize(device: th.device) -> None:
    if device.type == "cuda":
        th._C._cuda_synchronize()  # torch.cuda.synchronize() takes microseconds to find out which device is meant


def table(results: Results) -> str:
    """Markdown, without medians."""
    columns = list(dict.fromkeys(name for row in results.values() for name in row if "median" not in name))
    rows = [
        (subject, *(f"{row[column]:,.1f}" if column in row else "" for column in columns))
        for subject, row in results.items()
    ]
    return markdown_table(("", *columns), rows)


if __name__ == "__main__":
    main()
