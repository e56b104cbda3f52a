"""Do ``add`` and ``sample`` get slower in larger buffers, or with more environments?

    python -m benchmarks.studies.scaling                                # up to 1,000,000 transitions: some 15 minutes
    python -m benchmarks.studies.scaling --sizes 10000,10000000 --envs 4 --data halfcheetah
    python -m benchmarks.studies.scaling --quick

A buffer is filled, and every ``add`` is timed: the longest one shows the cost of growing arrays, choosing a method and
the like. Then ``add`` overwrites and alternates with ``sample``. Percentiles are those of single calls.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tqdm import tqdm

from benchmarks.recordings import load_recording
from benchmarks.report import markdown_table
from benchmarks.streams import Stream
from benchmarks.studies.workloads import FULL, N_ENVS, RESULTS, SB3, describe_run, mark, sb3_bytes
from benchmarks.targets import PAUSE
from benchmarks.workers import Worker, WorkerError
from sb3_extra_buffers.storage.choice import TRIALS

SIZES = (10_000, 100_000, 1_000_000)
ENV_COUNTS = (1, 4, 16, 64, 256)
STEPS_WITH_MANY = 3 * TRIALS[-1].begin // 2
"""Steps of each environment when the number of environments varies. The last trial of ``auto`` takes at most a quarter
of them, and some hundred to measure."""
PAIRS = 400
"""The most pairs of ``add`` and ``sample`` that are timed after filling."""
BATCH_SIZE = 256
SPARE_MEMORY = 0.6
"""The share of the available memory that SB3's buffer may take."""
PERCENTILES = {"p50": 50, "p99": 99, "max": 100}


@dataclass(frozen=True)
class Row:
    """One buffer. Times are in microseconds."""

    data: str
    subject: str
    transitions: int
    n_envs: int
    seconds: float
    """To fill the buffer, including playback."""
    filling: dict[str, Any]
    add: dict[str, float]
    sample: dict[str, float]
    bytes_per_transition: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mspacman,halfcheetah", help="recordings, separated by commas")
    parser.add_argument("--methods", default="auto", help="methods of this library (default: auto)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="transitions, with four environments")
    parser.add_argument(
        "--envs", default=",".join(map(str, ENV_COUNTS)), help="numbers of environments, separated by commas"
    )
    parser.add_argument("--quick", action="store_true", help="two small sizes and two numbers of environments")
    parser.add_argument("--out", type=Path, help="folder for scaling.json and scaling.md")
    arguments = parser.parse_args()
    sizes = [4_000, 16_000] if arguments.quick else [int(size) for size in arguments.sizes.split(",")]
    counts = [1, 16] if arguments.quick else [int(count) for count in arguments.envs.split(",")]
    out: Path = arguments.out or RESULTS / ("quick" if arguments.quick else "partial")
    out.mkdir(parents=True, exist_ok=True)

    subjects = [SB3, *(f"ours:{method}" for method in arguments.methods.split(","))]
    shapes = dict.fromkeys(
        [(size // N_ENVS, N_ENVS) for size in sizes] + [(STEPS_WITH_MANY, count) for count in counts]
    )
    run = describe_run("scaling")
    rows: list[Row] = []
    notes: list[str] = []
    cases = [(data, *shape, who) for data in arguments.data.split(",") for shape in shapes for who in subjects]
    for data, steps, n_envs, subject in tqdm(cases, "scaling", disable=None):
        load_recording(data, FULL.recorded_steps, N_ENVS)
        stream = Stream(data, steps, n_envs, FULL.recorded_steps, N_ENVS)
        needed = sb3_bytes(stream)
        if subject == SB3 and needed > SPARE_MEMORY * psutil.virtual_memory().available:
            notes.append(f"{data}, {stream.transitions:,} transitions: SB3's buffer would need {needed / 1e9:.0f} GB.")
            continue
        try:
            rows.append(measure(stream, subject))
        except WorkerError as error:
            notes.append(f"**Failed:** {error}")
        results = {"run": run, "rows": [asdict(row) for row in rows], "notes": notes}
        (out / "scaling.json").write_text(json.dumps(results, indent=1) + "\n")
        (out / "scaling.md").write_text(page(run, rows, notes))
    print((out / "scaling.md").read_text())
    print(f"Results are in {out}.", file=sys.stderr)
    return 1 if any("Failed" in note for note in notes) else 0


def measure(stream: Stream, subject: str) -> Row:
    """Measure one buffer at a time: large ones do not fit in memory together."""
    worker = Worker(subject)
    try:
        worker.ask("make", stream=asdict(stream))
        began = time.perf_counter()
        filling = worker.ask("fill_and_watch", steps=stream.steps)
        seconds = time.perf_counter() - began
        grown = worker.ask("growth")
        pairs = max(20, min(PAIRS, stream.steps // 2))
        turns = [worker.ask("add_and_sample", batch_size=BATCH_SIZE, times=pairs // 4) for _ in range(4)]
    finally:
        worker.close()
    return Row(
        data=stream.data,
        subject=subject,
        transitions=stream.transitions,
        n_envs=stream.n_envs,
        seconds=round(seconds, 1),
        filling=filling,
        add=percentiles(list(chain(*(turn["add"] for turn in turns)))),
        sample=percentiles(list(chain(*(turn["sample"] for turn in turns)))),
        bytes_per_transition=grown / stream.transitions,
    )


def percentiles(times: Sequence[float]) -> dict[str, float]:
    return {name: float(np.percentile(times, percentile)) for name, percentile in PERCENTILES.items()}


def page(run: dict[str, Any], rows: Sequence[Row], notes: Sequence[str]) -> str:
    about = f"`{run['command']}` on {run['date']}: {run['machine']}, load {run['load']} at the start."
    return "\n\n".join([about, table(rows), *notes]) + "\n"


def table(rows: Sequence[Row]) -> str:
    heads = (
        "data",
        "transitions",
        "environments",
        "buffer",
        "filling: `add` 50% / 99% / 99.9%, µs",
        "longest, µs (at step)",
        "`add` full: 50% / 99% / longest, µs",
        "per transition, µs",
        f"`sample({BATCH_SIZE})`: 50% / 99%, µs",
        "bytes (RSS)",
    )
    lines = []
    for row in rows:
        filling, add, sample = row.filling, row.add, row.sample
        cells = [
            row.data,
            f"{row.transitions:,}",
            str(row.n_envs),
            row.subject,
            f"{filling['p50']:,.0f} / {filling['p99']:,.0f} / {filling['p99.9']:,.0f}",
            f"{filling['max']:,.0f} ({filling['slowest'][0]['step']:,}) {mark(filling['max'] <= PAUSE)}",
            f"{add['p50']:,.0f} / {add['p99']:,.0f} / {add['max']:,.0f} {mark(add['max'] <= PAUSE)}",
            f"{add['p50'] / row.n_envs:,.1f}",
            f"{sample['p50']:,.0f} / {sample['p99']:,.0f}",
            f"{row.bytes_per_transition:,.0f}",
        ]
        lines.append(cells)
    return markdown_table(heads, lines)


if __name__ == "__main__":
    sys.exit(main())
