"""Run all tests and studies of the GPU buffers, save what they print, and compare the results with the goals.

python -m benchmarks.studies.gpu_all --folder benchmarks/results/gpu_h200
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import markdown_table

TESTS = [
    "-m",
    "pytest",
    "tests/gpu",
    "tests/training_utils",
    "-k",
    "cuda or untrusted or interruption",
    "-q",
    "-rfE",
    "-p",
    "no:benchmark",
]
"""Only the tests that need a GPU. All others run on machines without one."""


class Goal(NamedTuple):
    """A promised bound on a measured figure."""

    name: str
    study: str
    row: str
    column: str
    bound: float
    is_upper: bool = True


BUFFERS = "gpu"
GOALS = (
    Goal("sample(32), median, µs", BUFFERS, "delta", "sample(32), median, µs", 70),
    Goal("sample(256), median, µs", BUFFERS, "delta", "sample(256), median, µs", 70),
    Goal("add, then sample(32), mean, µs", BUFFERS, "delta", "add, then sample(32), µs", 200),
    Goal("add, then sample(256), mean, µs", BUFFERS, "delta", "add, then sample(256), µs", 220),
    Goal("kernel for a batch of 256, µs", BUFFERS, "delta", "kernel, batch of 256, µs", 12),
    Goal("add of observations on the device, mean, µs", BUFFERS, "delta from device", "add, µs", 90),
    Goal("the same, 99th percentile, µs", BUFFERS, "delta from device", "add, 99th percentile, µs", 200),
    Goal("memory taken / stored while growing", BUFFERS, "growth", "taken / stored, at most", 1.5),
    Goal("device bytes per transition of MsPacman", BUFFERS, "delta", "device bytes per transition", 450),
    Goal("DQN, batch 32, against SB3", "gpu_training", "DQN, batch 32", "GPU / SB3", 1.08, False),
    Goal("DQN, batch 256", "gpu_training", "DQN, batch 256", "GPU / SB3", 1.5, False),
    Goal(
        "DQN, batch 256, 4 gradient steps",
        "gpu_training",
        "DQN, batch 256, 4 gradient steps",
        "GPU / SB3",
        1.7,
        False,
    ),
    Goal("PPO, 64 environments", "gpu_training", "PPO, 64 environments", "GPU / SB3", 1.6, False),
    Goal(
        "PPO on the device, 256 environments",
        "gpu_device_loop",
        "PPO, 256 environments, 4 epochs",
        "on device / SB3",
        2.5,
        False,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("benchmarks/results/gpu"),
        help="where to save results and all that is printed",
    )
    parser.add_argument("--workers", default="auto", help="processes for the tests (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="*", help="some of: tests, exactness, gpu, gpu_training, gpu_device_loop, sequences"
    )
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    exactness = ["gpu_exactness", "--minutes", "0", "--rollouts", "40", "--transitions", "2000"]
    commands = {
        "tests": [*TESTS, "-n", arguments.workers, "-p", "no:cacheprovider"],
        "exactness": ["-m", f"benchmarks.studies.{exactness[0]}", *exactness[1:]],
    }
    for study in (BUFFERS, "gpu_training", "gpu_device_loop"):
        commands[study] = ["-m", f"benchmarks.studies.{study}", "--json", str(folder / f"{study}.json")]
    commands["sequences"] = ["-m", "benchmarks.studies.sequences", "--device", "cuda"]
    commands["sequences"] += ["--json", str(folder / "sequences.json")]
    good = True
    for name, command in commands.items():
        if arguments.only is None or name in arguments.only:
            good &= run(name, command, folder)
    print(goals(folder))
    (folder / "goals.md").write_text(goals(folder))
    sys.exit(0 if good else 1)


def run(name: str, command: list[str], folder: Path) -> bool:
    began = time.perf_counter()
    with (folder / f"{name}.txt").open("w") as output:
        print("python", *command, file=output, flush=True)
        code = subprocess.run(
            [sys.executable, *command], stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    verdict = "succeeded" if code == 0 else f"FAILED with {code}"
    print(f"{name:16s} {verdict} in {time.perf_counter() - began:.0f} s", flush=True)
    return code == 0


def goals(folder: Path) -> str:
    """A table of what was promised and what was measured, for the studies that have run."""
    rows = []
    for goal in GOALS:
        path = folder / f"{goal.study}.json"
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text())
            value = found.get("results", found).get(goal.row, {}).get(goal.column)
            if value is not None:
                is_met = value <= goal.bound if goal.is_upper else value >= goal.bound
                sign = "≤" if goal.is_upper else "≥"
                rows.append((goal.name, f"{sign} {goal.bound:g}", f"{value:.4g}", "" if is_met else "missed"))
    return markdown_table(("", "promised", "measured", ""), rows) + "\n"


if __name__ == "__main__":
    main()
