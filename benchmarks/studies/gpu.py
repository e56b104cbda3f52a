"""Buffers on a GPU next to SB3's in host memory, on a recording of MsPacman.

    python -m benchmarks.studies.gpu --json results.json

Times are wall times through SB3's interface, the wait for the device included, medians of many calls; "kernel" is the
device's time for rebuilding a batch alone. "dense index" is not a buffer: it takes rows from two tensors on the device,
which is the least that any buffer there has to do. Subjects that end in "from device" get observations that are on the
device already. ``zstd`` is kept in host memory, and without a GPU, ``--device cpu`` has everything there.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
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
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer
from sb3_extra_buffers.gpu_buffers.kernels import ObservationBatch, uses_triton
from sb3_extra_buffers.gpu_buffers.observation_store import PackedObservationStore
from sb3_extra_buffers.gpu_buffers.transfer import Places, upload
from sb3_extra_buffers.storage.config import FrameStack

SB3, DENSE = "SB3", "dense index"
FROM_DEVICE = " from device"
SUBJECTS = (
    "delta",
    "delta x2",
    "delta from device",
    "rle",
    "rle from device",
    "none",
    "none from device",
    "zstd",
)
BATCH_SIZES = (32, 256)
ROLLOUT_STEPS, ROLLOUT_ENVS, EPOCHS = 128, 64, 4
FEWER_STEPS = 5_000
"""The most steps for subjects whose speed does not depend on how much is stored."""

Results = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=50_000, help="steps of 4 environments (default: %(default)s)")
    parser.add_argument("--methods", default=",".join(SUBJECTS), help="separated by commas")
    parser.add_argument("--repeats", type=int, default=300, help="samples per batch size (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    device = th.device(arguments.device)
    recording = load_recording("mspacman", min(max(arguments.steps, ROLLOUT_STEPS * ROLLOUT_ENVS), 25_000))

    fewer = min(FEWER_STEPS, arguments.steps)
    results: Results = {
        SB3: measure_replay(SB3, recording, fewer, device, arguments.repeats),
        DENSE: measure_dense(recording, fewer, device, arguments.repeats),
    }
    for method in arguments.methods.split(","):
        steps = arguments.steps if method in ("delta", "delta x2") else fewer
        results[method] = measure_replay(method, recording, steps, device, arguments.repeats)
    for subject in (SB3, "delta"):
        results[subject]["rollout, 4 epochs, µs"] = measure_rollout(subject, recording, device)
    print(f"\nMsPacman, {arguments.steps * 4:,} transitions ({fewer * 4:,} but for delta)\n")
    print(table(results))
    if arguments.json:
        name = th.cuda.get_device_name() if device.type == "cuda" else "CPU"
        versions = {
            "torch": th.__version__,
            "device": name,
            "triton": uses_triton(device),
        }
        arguments.json.write_text(json.dumps({"versions": versions, "results": results}, indent=1) + "\n")


def measure_replay(subject: str, recording: Recording, steps: int, device: th.device, repeats: int) -> dict[str, float]:
    """Fill a buffer, then sample from it."""
    gc.collect()  # the buffer before may still be there
    size = steps * recording.n_envs
    space, actions = recording.observation_space, recording.action_space
    buffer: ReplayBuffer
    if subject == SB3:
        buffer = ReplayBuffer(size, space, actions, device, recording.n_envs)
    else:
        method, _, group = subject.removesuffix(FROM_DEVICE).partition(" x")
        options = {"frames_per_record": int(group)} if group else None
        stack: FrameStack = recording.stack if subject.endswith(FROM_DEVICE) else "auto"
        buffer = GpuReplayBuffer(
            size, space, actions, device, recording.n_envs,
            compression_method=method, compression_kwargs=options, frame_stack=stack,
        )  # fmt: skip
    spent = []
    for transition in tqdm(islice(_again(recording), steps), subject, total=steps, unit="step", mininterval=5):
        if subject.endswith(FROM_DEVICE):
            transition = _on_device(transition, device)
        spent.append(_microseconds(buffer.add, *transition))
    spent.sort()
    found = {"add, µs": statistics.fmean(spent[: len(spent) * 99 // 100])}  # without what compiled
    found["add, 99th percentile, µs"] = spent[len(spent) * 99 // 100]
    for batch_size in BATCH_SIZES:
        found[f"sample({batch_size}), µs"] = _median_time(partial(buffer.sample, batch_size), device, repeats)
        found[f"add, then sample({batch_size}), µs"] = _mean_of_both(subject, buffer, recording, device, batch_size)
    if isinstance(buffer, GpuReplayBuffer):
        found["device bytes per transition"] = buffer.device_bytes / size
        if device.type == "cuda" and uses_triton(device) and method in ("delta", "rle"):
            found["kernel, batch of 256, µs"] = _kernel_time(buffer)
    return found


def measure_dense(recording: Recording, steps: int, device: th.device, repeats: int) -> dict[str, float]:
    """Rows of two tensors at places that the host draws, as SB3 does."""
    size = math.prod(recording.observation_space.shape)
    columns = [th.zeros((steps * recording.n_envs, size), dtype=th.uint8, device=device) for _ in range(2)]

    def sample(batch_size: int) -> None:
        slots = np.random.randint(0, steps, size=batch_size)
        rows = slots * recording.n_envs + np.random.randint(0, recording.n_envs, size=batch_size)
        on_device = upload(rows, device)
        for column in columns:
            column[on_device]

    return {f"sample({n}), µs": _median_time(partial(sample, n), device, repeats) for n in BATCH_SIZES}


def measure_rollout(subject: str, recording: Recording, device: th.device) -> float:
    """Microseconds for four epochs of batches of a rollout, which is filled before."""
    space, actions = recording.observation_space, spaces.Discrete(9)
    kind = RolloutBuffer if subject == SB3 else GpuRolloutBuffer
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


def _again(recording: Recording) -> Iterator[Transition]:
    """The recording over and over."""
    while True:
        yield from transitions(recording)


def _many_environments(recording: Recording) -> Iterator[Any]:
    """The steps of a rollout with more environments than were recorded: later parts of the recording are put beside."""
    copies = ROLLOUT_ENVS // recording.n_envs
    seen = [transition.obs for transition in islice(transitions(recording), ROLLOUT_STEPS * copies)]
    for step in range(ROLLOUT_STEPS):
        parts = [seen[copy * ROLLOUT_STEPS + step].transpose(0, 2, 3, 1) for copy in range(copies)]
        yield np.concatenate(parts).transpose(0, 3, 1, 2)


def _on_device(transition: Transition, device: th.device) -> Any:
    """The same with observations as an environment on the device would give them."""
    obs, next_obs, *rest = transition
    found = [upload(np.ascontiguousarray(part), device) for part in (obs, next_obs)]
    _synchronize(device)
    return (*found, *rest)


def _median_time(work: Callable[[], Any], device: th.device, repeats: int) -> float:
    times = []
    for repeat in range(repeats + 20):
        np.random.seed(repeat)
        began = time.perf_counter()
        work()
        _synchronize(device)
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times[20:])


def _mean_of_both(
    subject: str, buffer: ReplayBuffer, recording: Recording, device: th.device, batch_size: int, repeats: int = 400
) -> float:
    """What an ``add`` and a ``sample`` cost together, as in the training of DQN: a mean without the slowest one in
    100."""
    times = []
    for transition in islice(transitions(recording), repeats):
        if subject.endswith(FROM_DEVICE):
            transition = _on_device(transition, device)
        began = time.perf_counter()
        buffer.add(*transition)
        buffer.sample(batch_size)
        _synchronize(device)
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.fmean(sorted(times)[: repeats * 99 // 100])


def _kernel_time(buffer: GpuReplayBuffer, batch_size: int = 256, n_batches: int = 20) -> float:
    """Microseconds that the device takes to rebuild a batch, of many in a graph, so that launches cost nothing."""
    (store,) = buffer._stores.values()
    assert isinstance(store, PackedObservationStore)
    frames = store.device_frames
    assert frames is not None
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(n_batches):
        slots = rng.integers(buffer.size(), size=batch_size)
        places = Places([slots], rng.integers(buffer.n_envs, size=batch_size), store.device)
        shape = (batch_size, store.layout.stack, store.layout.frame.nbytes)
        outs = [th.empty(shape, dtype=th.uint8, device=store.device) for _ in range(2)]
        batches.append(ObservationBatch(places, store._device_ends, outs))
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
        times.append(1e3 * start.elapsed_time(end) / n_batches)
    return float(statistics.median(times))


def _microseconds(work: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    work(*arguments)
    return 1e6 * (time.perf_counter() - began)


def _synchronize(device: th.device) -> None:
    if device.type == "cuda":
        th.cuda.synchronize()


def table(results: Results) -> str:
    """Markdown."""
    columns = list(dict.fromkeys(column for row in results.values() for column in row))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for subject, row in results.items():
        cells = [f"{row[column]:,.1f}" if column in row else "" for column in columns]
        lines.append(f"| {subject} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
