"""Measure buffers of this library and of others on recordings of real environments.

    python -m benchmarks                    # everything: some 45 minutes on two cores
    python -m benchmarks --quick            # a small part: about two minutes
    python -m benchmarks --sections replay --data doom_labels,doom_rgb --subjects sb3,ours
    python -m benchmarks --sections replay --data mspacman,pong,breakout --subjects sb3,ours:auto --steps 25000

Writes results.json, results.md and pictures. Missing recordings, and missing virtual environments for the other
libraries, are created first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import peers, plots, report
from benchmarks.plan import FULL, GAME, QUICK, WORKLOAD_DATA, Plan, choose, subjects_of
from benchmarks.recordings import load_recording
from benchmarks.results import Table
from benchmarks.sections import replay, rollouts, saving, scaling, training
from benchmarks.subjects import library_of
from benchmarks.workers import Workers

SECTIONS = ("replay", "saving", "rollouts", "sizes", "environments", "training")
RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="less data, fewer buffers and fewer repeats")
    parser.add_argument(
        "--sections", type=_names, default=list(SECTIONS), help=f"what to measure (default: {','.join(SECTIONS)})"
    )
    known = ", ".join(FULL.data | WORKLOAD_DATA)
    parser.add_argument("--data", type=_names, help=f"recordings for the section replay, some of {known}")
    parser.add_argument("--steps", type=int, help="steps of each environment, in the section replay")
    parser.add_argument("--subjects", type=_names, help="libraries (sb3, ours, ...) or library:method (default: all)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: one in benchmarks/results)")
    parser.add_argument(
        "--resume", action="store_true", help="reuse the results that an interrupted run left in that folder"
    )
    parser.add_argument("--publish", action="store_true", help="also write the report to docs/")
    arguments = parser.parse_args()
    everything = not any((arguments.data, arguments.steps, arguments.subjects)) and arguments.sections == list(SECTIONS)
    out: Path = arguments.out or RESULTS / ("quick" if arguments.quick else "full" if everything else "partial")
    try:
        plan = choose(QUICK if arguments.quick else FULL, arguments.data, arguments.subjects, arguments.steps)
        parts = parts_of(plan, arguments.sections)
        versions = check_libraries(
            [subject for section in arguments.sections for subject in subjects_of(plan, section)]
        )
    except (ValueError, peers.MissingPeerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    make_recordings(plan, arguments.sections)
    run = describe_run(versions)
    tables = measure(parts, out, {"run": run["command"], "versions": versions}, arguments.resume)
    (out / "results.json").write_text(
        json.dumps({"run": run, "tables": [table.to_json() for table in tables]}, indent=1) + "\n"
    )
    write_report(run, tables, out, "results.md")
    if arguments.publish:
        write_report(run, tables, DOCS, "benchmark-results.md")
    print((out / "results.md").read_text())
    failures = [reason for table in tables for reason in table.failures.values()]
    print(f"Results are in {out}.", *failures, sep="\n", file=sys.stderr)
    return 1 if failures else 0


def parts_of(plan: Plan, sections: list[str]) -> dict[str, Callable[[], Table]]:
    """Return the parts of a run: a name for each, and the function that measures it.

    Sections and data without a chosen subject are left out.
    """
    parts: dict[str, dict[str, Callable[[], Table]]] = {
        "replay": {
            f"replay-{name}": partial(replay.measure, plan, name) for name, data in plan.data.items() if data.subjects
        },
        "saving": {"saving": partial(saving.measure, plan)},
        "rollouts": {"rollouts": partial(rollouts.measure, plan)},
        "sizes": {"sizes": partial(scaling.measure_sizes, plan)},
        "environments": {"environments": partial(scaling.measure_envs, plan)},
        "training": {"training": partial(training.measure, plan)},
    }
    unknown = [section for section in sections if section not in parts]
    if unknown:
        raise ValueError(f"unknown section {', '.join(unknown)}; known are {', '.join(parts)}")
    chosen = [section for section in sections if subjects_of(plan, section)]
    return {name: part for section in chosen for name, part in parts[section].items()}


def check_libraries(subjects: list[str]) -> dict[str, str]:
    """Return the version of each library under test.

    :raises MissingPeerError: if one of them cannot be used here.
    """
    one_of_each = {subject.partition(":")[0]: subject for subject in subjects}
    for environment in dict.fromkeys(library_of(subject).peers for subject in one_of_each.values()):
        if environment is not None:
            peers.prepare(environment)
    with Workers(list(one_of_each.values()), "libraries") as workers:
        versions = workers.at_once("load_library")
        if workers.failures:
            others = ",".join(name for name, subject in one_of_each.items() if subject in versions)
            raise peers.MissingPeerError(
                "\n".join([*workers.failures.values(), f"Measure the others with --subjects {others}"])
            )
    return {library_of(subject).title: version for subject, version in versions.items()}


def make_recordings(plan: Plan, sections: list[str]) -> None:
    """Create missing recordings here: workers of other libraries lack the packages for it."""
    if "replay" in sections:
        for name, data in plan.data.items():
            load_recording(name, data.steps, data.n_envs)
    if sections != ["replay"]:
        load_recording(GAME, plan.recorded_steps)


def measure(parts: dict[str, Callable[[], Table]], out: Path, fingerprint: dict[str, Any], resume: bool) -> list[Table]:
    """Measure the parts one by one. Each result is written at once, so that an interrupted run can be resumed."""
    folder = out / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    tables = []
    for number, (name, part) in enumerate(parts.items(), 1):
        path = folder / f"{name}.json"
        kept = json.loads(path.read_text()) if resume and path.exists() else None
        if kept and kept["fingerprint"] == fingerprint:
            tables.append(Table.from_json(kept["table"]))
            continue
        began = time.perf_counter()
        table = part()
        table.seconds = time.perf_counter() - began
        path.write_text(json.dumps({"fingerprint": fingerprint, "table": table.to_json()}, indent=1))
        tables.append(table)
        print(f"[{number}/{len(parts)}] {table.title}: {table.seconds:.0f} s", file=sys.stderr)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    return tables


def describe_run(versions: dict[str, str]) -> dict[str, Any]:
    arguments = [argument for argument in sys.argv[1:] if argument != "--resume"]
    machine = [
        f"{platform.system()} {platform.machine()}",
        f"{os.cpu_count()} cores",
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        f"load {psutil.getloadavg()[0]:.1f} at the start",
        f"Python {platform.python_version()}",
    ]
    return {
        "command": shlex.join(["python", "-m", "benchmarks", *arguments]),
        "date": date.today().isoformat(),
        "machine": ", ".join(machine),
        "versions": versions,
    }


def write_report(run: dict[str, Any], tables: list[Table], folder: Path, name: str) -> None:
    pictures = plots.draw(tables, folder / "images")
    links = {table: f"images/{picture}" for table, picture in pictures.items()}
    (folder / name).write_text(report.page(run, tables, links))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # this runs the cleanup of temporary folders
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Interrupted. Run the same command with --resume to continue with the part that was being measured.")
