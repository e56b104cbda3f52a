"""What does the first use of the library cost, before a buffer holds anything?

    python -m benchmarks.studies.first_use

A fresh process adds images to a replay buffer and samples. Resident memory and CPU time are printed after each step:
first with an empty cache, so that numba compiles all kernels, then with the cache that the first run has filled. Then
the same with vectors, which need no kernels, and with SB3's buffer. File-backed pages are shared by all processes that
use the file, and the system can drop them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import psutil
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from benchmarks.report import markdown_table
from benchmarks.studies.workloads import describe_run

IMAGES = spaces.Box(0, 255, (84, 84, 4), np.uint8)
RUNS = {
    "images, kernels compiled": "images",
    "images, kernels from the cache": "images",
    "vectors": "vectors",
    "SB3's buffer, images": "sb3",
}


class Step(NamedTuple):
    """What the process had used when a step was over: bytes, and seconds."""

    what: str
    resident: int
    anonymous: int
    cpu_seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", choices=sorted({*RUNS.values()}), help=argparse.SUPPRESS)
    kind = parser.parse_args().worker
    if kind is not None:
        print(json.dumps(use(kind)))
        return 0
    run = describe_run("first_use")
    print(f"`{run['command']}` on {run['date']}: {run['machine']}, load {run['load']} at the start.\n")
    heads = ("", "resident memory, MB", "growth, MB", "of which anonymous, MB", "CPU time, s")
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for title, kind in RUNS.items():
            command = [sys.executable, "-m", "benchmarks.studies.first_use", "--worker", kind]
            environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
            answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            steps = [Step(*step) for step in json.loads(answer.splitlines()[-1])]
            rows.append(_cells(f"**{title}**", steps[0], steps[-1]))
            rows += [_cells(after.what, before, after) for before, after in pairwise([steps[0], *steps])]
    print(markdown_table(heads, rows))
    return 0


def use(kind: str) -> list[Step]:
    """Use a buffer in this process, which must not have imported the library yet."""
    steps: list[Step] = []

    def note(what: str) -> None:
        memory = psutil.Process().memory_info()
        steps.append(Step(what, memory.rss, memory.rss - getattr(memory, "shared", 0), time.process_time()))

    space = spaces.Box(-np.inf, np.inf, (17,), np.float64) if kind == "vectors" else IMAGES
    values = np.random.default_rng(0).integers(0, 2, (90, 1, *space.shape)).astype(space.dtype)
    note("NumPy, torch and SB3 are imported")
    buffer_class = ReplayBuffer
    if kind != "sb3":
        from sb3_extra_buffers.compressed import CompressedReplayBuffer

        buffer_class = CompressedReplayBuffer
        note("import sb3_extra_buffers.compressed")
    if kind == "images":
        for package in ("llvmlite.binding", "numba"):
            import_module(package)
            note(f"import {package.partition('.')[0]}")
        from sb3_extra_buffers.compiled import load_kernels

        for module in ("storage.matching_kernels", "codecs.delta_encode_kernels", "storage.gather_kernels"):
            load_kernels(f"sb3_extra_buffers.{module}")
            note(module)
    buffer = buffer_class(1_000, space, spaces.Discrete(2), "cpu")
    note("an empty buffer")
    action, reward, done = np.zeros((1, 1), np.int64), np.zeros(1, np.float32), np.zeros(1, bool)
    for before, after in pairwise(values[:81]):
        buffer.add(before, after, action, reward, done, [{}])
    note("80 calls of add()")
    buffer.sample(32)
    note("sample(32)")
    return steps


def _cells(what: str, before: Step, after: Step) -> tuple[str, ...]:
    megabytes = (after.resident, after.resident - before.resident, after.anonymous - before.anonymous)
    return what, *(f"{size / 1e6:.0f}" for size in megabytes), f"{after.cpu_seconds - before.cpu_seconds:.1f}"


if __name__ == "__main__":
    sys.exit(main())
