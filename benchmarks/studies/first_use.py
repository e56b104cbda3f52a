"""What does the first use of the library cost, before a buffer holds anything?

    python -m benchmarks.studies.first_use

A fresh process adds images to a replay buffer and samples. Resident memory and CPU time are printed after each step:
first with an empty cache, so that numba compiles all kernels, then with the cache that the first run has filled. Then
the same with vectors, which need no kernels, and with SB3's buffer. File-backed pages are shared by all processes that
use the file, and the system can drop them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from typing import Any

from benchmarks.studies.workloads import describe_run

SCRIPT = """
import json, sys, time
import psutil, numpy as np, stable_baselines3
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

kind, steps = sys.argv[1], []
def note(what):
    memory = psutil.Process().memory_info()
    steps.append([what, memory.rss, memory.rss - getattr(memory, "shared", 0), time.process_time()])

shape, dtype = ((17,), np.float64) if kind == "vectors" else ((84, 84, 4), np.uint8)
values = np.random.default_rng(0).integers(0, 2, (90, 1, *shape)).astype(dtype)
note("NumPy, torch and SB3 are imported")
if kind == "sb3":
    cls = ReplayBuffer
else:
    from sb3_extra_buffers.compressed import CompressedReplayBuffer as cls
    note("import sb3_extra_buffers.compressed")
if kind == "images":
    import llvmlite.binding
    note("import llvmlite")
    import numba
    note("import numba")
    from sb3_extra_buffers.compiled import load_kernels
    for module in ("storage.matching_kernels", "codecs.delta_encode_kernels", "storage.gather_kernels"):
        load_kernels(f"sb3_extra_buffers.{module}")
        note(f"{module}")
buffer = cls(1_000, spaces.Box(0, 255, shape, dtype), spaces.Discrete(2), "cpu")
note("an empty buffer")
rows = [np.zeros((1, 1), np.int64), np.zeros(1, np.float32), np.zeros(1, bool), [{}]]
for t in range(80):
    buffer.add(values[t], values[t + 1], *rows)
note("80 calls of add()")
buffer.sample(32)
note("sample(32)")
print(json.dumps(steps))
"""
RUNS = {
    "images, kernels compiled": "images",
    "images, kernels from the cache": "images",
    "vectors": "vectors",
    "SB3's buffer, images": "sb3",
}


def main() -> int:
    run = describe_run("first_use")
    print(f"`{run['command']}` on {run['date']}: {run['machine']}, load {run['load']} at the start.\n")
    heads = ("", "resident memory, MB", "growth, MB", "of which anonymous, MB", "CPU time, s")
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    with tempfile.TemporaryDirectory() as cache:
        for title, kind in RUNS.items():
            command = [sys.executable, "-c", SCRIPT, kind]
            environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
            answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            steps = json.loads(answer.splitlines()[-1])
            print(_line(f"**{title}**", steps[0], steps[-1]))
            for before, after in pairwise([steps[0], *steps]):
                print(_line(after[0], before, after))
    return 0


def _line(what: str, before: list[Any], after: list[Any]) -> str:
    resident, anonymous = ((after[i] - before[i]) / 1e6 for i in (1, 2))
    cells = (what, f"{after[1] / 1e6:.0f}", f"{resident:.0f}", f"{anonymous:.0f}", f"{after[3] - before[3]:.1f}")
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
