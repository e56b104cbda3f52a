"""``CompressedStorage`` compared with ``LazyTensorStorage``, in TorchRL's own replay buffers.

    python -m benchmarks.studies.torchrl_storage

Both hold the same steps of a recorded game, with next observations. Their calls take turns. Memory is the growth of
resident memory while a buffer is filled. Small buffers are filled and sampled first, so that code that is loaded on
first use does not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.peers import prepare, python_for
from benchmarks.recordings import load_recording
from benchmarks.report import markdown_table
from benchmarks.studies.sequences import steps_of
from benchmarks.worker import resident_bytes

ROOT = Path(__file__).parents[2]
BATCH = 50
"""How many steps are added at once."""
WARM_UP_STEPS = 200


def filled(storage: Any, game: str, n_steps: int, stack: int) -> tuple[Any, float]:
    """Fill a buffer with ``n_steps`` steps of each environment. Return it, and the median seconds to add a step."""
    import torch as th
    from tensordict import TensorDict
    from torchrl.data import TensorDictReplayBuffer

    buffer = TensorDictReplayBuffer(storage=storage, batch_size=32)
    steps = steps_of(load_recording(game, n_steps), stack, n_steps)
    spent = []
    while part := list(islice(steps, BATCH)):
        fields = {
            "pixels": th.stack([th.from_numpy(step.obs) for step in part]),
            "action": th.tensor([step.action for step in part]),
            "next": {
                "pixels": th.stack([th.from_numpy(step.next_obs) for step in part]),
                "reward": th.tensor([[step.reward] for step in part]),
                "done": th.tensor([[step.is_last] for step in part]),
            },
        }
        rows = TensorDict(fields, batch_size=[len(part)])
        began = time.perf_counter()
        buffer.extend(rows)
        spent.append((time.perf_counter() - began) / len(part))
    return buffer, statistics.median(spent)


def measure(game: str, n_steps: int, stack: int, repeats: int) -> None:
    import torch as th
    from torchrl.data import LazyTensorStorage, SliceSampler

    from sb3_extra_buffers.torchrl import CompressedStorage

    th.set_num_threads(2)
    buffers, adding, memory = {}, {}, {}
    for storage in (CompressedStorage, LazyTensorStorage):
        filled(storage(4 * WARM_UP_STEPS), game, WARM_UP_STEPS, stack)[0].sample()
        name, before = storage.__name__, resident_bytes()
        buffers[name], adding[name] = filled(storage(4 * n_steps), game, n_steps, stack)
        memory[name] = resident_bytes() - before
    single = times_of(buffers, 32, repeats)
    for buffer in buffers.values():
        buffer.set_sampler(SliceSampler(slice_len=64, end_key=("next", "done")))
    sequences = times_of(buffers, 16 * 64, repeats)
    print(f"\n{4 * n_steps:,} steps of {game}, {stack} frames each\n")
    rows = [
        (
            f"`{name}`",
            f"{single[name]:.2f} ms",
            f"{sequences[name]:.0f} ms",
            f"{1e6 * adding[name]:.0f} µs",
            f"{memory[name] / 1e6:,.0f} MB",
        )
        for name in buffers
    ]
    print(markdown_table(("", "32 steps", "16 sequences of 64", "`extend()`, per step", "memory"), rows))


def times_of(buffers: dict[str, Any], batch_size: int, repeats: int) -> dict[str, float]:
    """The milliseconds that ``sample()`` takes: the 10th percentile, since other programs may be running."""
    times: dict[str, list[float]] = {name: [] for name in buffers}
    for _ in range(repeats):
        for name, buffer in buffers.items():
            buffer.sample(batch_size)
            began = time.perf_counter()
            buffer.sample(batch_size)
            times[name].append(time.perf_counter() - began)
    return {name: 1e3 * statistics.quantiles(values, n=10)[0] for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="mspacman")
    parser.add_argument("--steps", type=int, default=5_000, help="steps of each of four environments")
    parser.add_argument("--stack", type=int, default=4, help="frames per observation")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        measure(given.game, given.steps, given.stack, given.repeats)
        return
    prepare("others")
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "passive",
        "PYTHONWARNINGS": "ignore",
        "RL_LOGGING_LEVEL": "WARNING",
    }
    environment["PYTHONPATH"] = str(ROOT / "src")
    command = [str(python_for("others")), "-m", "benchmarks.studies.torchrl_storage", *sys.argv[1:], "--worker"]
    sys.exit(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
