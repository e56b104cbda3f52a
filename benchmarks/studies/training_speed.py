"""How much faster does a whole training run become? PPO and DQN on MsPacman, with SB3's buffer and with this library's.

    python -m benchmarks.studies.training_speed             # 8 minutes
    python -m benchmarks.studies.training_speed --quick     # only checks that it runs

Two processes train the same model with the same seed, in alternating turns of some seconds. So turns of the same number
have exactly the same work, and other load on the machine affects both. The result is the median ratio of these pairs.
"Without any buffer" is the ratio that a buffer would reach if its methods took no time.

The allocator keeps freed memory (``KEEP_MEMORY``). Otherwise, page faults on torch's intermediate results would take
time, and how much differs between processes by more than a buffer takes.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import markdown_table
from benchmarks.results import Figure
from benchmarks.sections.training import KEEP_MEMORY
from benchmarks.studies.workloads import RESULTS, SB3, describe_run, mark
from benchmarks.workers import Workers

OURS = "ours:auto"
ALGORITHMS = {"DQN": 512, "PPO": 1024}
"""Algorithm → the fewest steps that a turn can have: for PPO one rollout, for DQN enough to train."""
LEAST_RATIO = 1.02
"""How many times faster than with SB3's buffer training must be."""
SECONDS = 480.0
SECONDS_OF_A_TURN = 6.0
WARM_UP_TURNS = 2
"""Turns that do not count, in which kernels are loaded and the early trials of ``auto`` take place."""


@dataclass(frozen=True)
class Row:
    """One algorithm. Speeds are steps per second, of all environments together."""

    algorithm: str
    turns: int
    steps_of_a_turn: int
    sb3: Figure
    ours: Figure
    ratio: Figure
    error: float
    """The standard error of the median ratio, by bootstrap."""
    bound: float
    """The ratio if a buffer took no time at all. It follows from the time that SB3's buffer takes."""
    is_same: bool
    """Whether both trained the same network."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="separated by commas (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"time for all algorithms (default: {SECONDS:.0f})"
    )
    parser.add_argument("--quick", action="store_true", help="two short turns, to see whether it runs")
    parser.add_argument("--out", type=Path, help="folder for training_speed.json and training_speed.md")
    arguments = parser.parse_args()
    algorithms = arguments.algorithms.split(",")
    out: Path = arguments.out or RESULTS / ("quick" if arguments.quick else "partial")
    out.mkdir(parents=True, exist_ok=True)
    run, rows = describe_run("training_speed"), []
    for algorithm in algorithms:
        rows.append(measure(algorithm, arguments.seconds / len(algorithms), arguments.quick))
        results = {"run": run, "rows": [asdict(row) for row in rows]}
        (out / "training_speed.json").write_text(json.dumps(results, indent=1) + "\n")
        (out / "training_speed.md").write_text(page(run, rows))
    print(page(run, rows))
    print(f"Results are in {out}.", file=sys.stderr)
    return 0 if all(row.is_same for row in rows) else 1


def measure(algorithm: str, seconds: float, quick: bool) -> Row:
    steps = ALGORITHMS[algorithm]
    with Workers([SB3, OURS], algorithm, KEEP_MEMORY) as workers:
        workers.at_once("make_model", algorithm=algorithm)
        turns = 2
        if not quick:
            warm_up = workers.in_turn(WARM_UP_TURNS, "train_on", steps=steps)
            slowest = max(found[-1]["seconds"] for found in warm_up.values())
            spent = sum(turn["seconds"] for found in warm_up.values() for turn in found)
            longer = max(1, round(SECONDS_OF_A_TURN / slowest))
            turns = max(4, int((seconds - spent) / (2 * slowest * longer)))
            steps *= longer
        found = workers.in_turn(turns, "train_on", steps=steps)
        networks = set(workers.at_once("network").values())
        if workers.failures:
            raise SystemExit("\n".join(workers.failures.values()))
    speeds = {subject: [turn["steps"] / turn["seconds"] for turn in found[subject]] for subject in (SB3, OURS)}
    ratios = np.array(speeds[OURS]) / np.array(speeds[SB3])
    free = [turn["seconds"] / (turn["seconds"] - turn["in_buffer"]) for turn in found[SB3]]
    medians = np.median(np.random.default_rng(0).choice(ratios, (1000, turns)), axis=1)
    return Row(
        algorithm=algorithm,
        turns=turns,
        steps_of_a_turn=steps,
        sb3=Figure.of(speeds[SB3]),
        ours=Figure.of(speeds[OURS]),
        ratio=Figure.of(ratios.tolist()),
        error=float(medians.std()),
        bound=float(np.median(free)),
        is_same=len(networks) == 1,
    )


def page(run: dict[str, Any], rows: list[Row]) -> str:
    about = f"`{run['command']}` on {run['date']}: {run['machine']}, load {run['load']} at the start."
    heads = (
        "algorithm",
        "turns",
        "steps per turn",
        "SB3, steps/s",
        "ours, steps/s",
        "ratio (quartiles)",
        "standard error",
        "without any buffer",
        "network",
    )
    lines = []
    for row in rows:
        is_met = row.ratio.median >= LEAST_RATIO and row.error < LEAST_RATIO - 1
        cells = [
            row.algorithm,
            str(row.turns),
            f"{row.steps_of_a_turn:,}",
            f"{row.sb3.median:,.0f}",
            f"{row.ours.median:,.0f}",
            f"{row.ratio.median:.3f} ({row.ratio.low:.3f} to {row.ratio.high:.3f}) {mark(is_met)}",
            f"±{row.error:.3f}",
            f"{row.bound:.3f}",
            "the same" if row.is_same else "**different**",
        ]
        lines.append(cells)
    return f"{about}\n\n{markdown_table(heads, lines)}\n"


if __name__ == "__main__":
    sys.exit(main())
