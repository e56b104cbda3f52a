"""Is the library as fast as SB3 on workloads that it was not tuned on?

    python -m benchmarks.studies.workloads                       # 23 workloads: about four minutes on two quiet cores
    python -m benchmarks.studies.workloads --names held-out      # twelve other games: about two minutes
    python -m benchmarks.studies.workloads --quick --names enduro,rgb --methods auto,delta,none

Every buffer has a process of its own, and the processes take turns of a few milliseconds. A buffer is filled first.
Then ``add`` overwrites and alternates with ``sample``, as in training. Ratios are SB3's time divided by ours, turn by
turn: above 1 is faster than SB3. The table shows medians, half the interquartile range, and which targets are met.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tqdm import tqdm

from benchmarks.environments import ENVIRONMENTS, HELD_OUT, WORKLOADS
from benchmarks.peers import MissingPeerError
from benchmarks.recordings import load_recording, longest_recording
from benchmarks.report import markdown_table
from benchmarks.results import Figure
from benchmarks.streams import Stream
from benchmarks.targets import PAUSE, Targets, is_within, targets_of
from benchmarks.workers import Workers

SB3 = "sb3"
N_ENVS = 4
BATCH_SIZES = (32, 256)
VECTOR_TRANSITIONS = 100_000
VECTOR_BYTES = 20_000_000
"""The least data for measuring the memory of vectors: transitions, and bytes of SB3's buffer. With less, growth for
other reasons, some hundred kilobytes, would be too large a part."""
RESULTS = Path(__file__).parents[1] / "results"
MET, MISSED = "✓", "✗"


@dataclass(frozen=True)
class Effort:
    transitions: int
    """Transitions in a full buffer."""
    rounds: int
    """Turns of each buffer, for each batch size."""
    pairs: int
    """Calls of ``add`` and ``sample`` in a turn."""

    @property
    def recorded_steps(self) -> int:
        """Steps of the recording. There are enough that a full buffer never holds a step twice."""
        return self.transitions // N_ENVS + len(BATCH_SIZES) * self.rounds * self.pairs


FULL = Effort(transitions=12_000, rounds=25, pairs=30)
QUICK = Effort(transitions=4_000, rounds=8, pairs=20)


@dataclass(frozen=True)
class Row:
    """One method on one workload, next to SB3 in the same turns. Times are in microseconds."""

    name: str
    method: str
    chosen: str
    """The method in use: for ``auto``, what it chose."""
    why: str
    """What ``auto`` measured before it chose."""
    times: dict[str, dict[str, Figure]]
    """Of ``add``, ``sample(32)`` and ``sample(256)``, each for ``sb3`` and ``ours``."""
    ratios: dict[str, Figure]
    add_p99: float
    sb3_add_p99: float
    longest_add: float
    """The longest ``add``, while the buffer was filled or later."""
    longest_at: str
    sb3_longest_add: float
    rss_bytes: float
    """Growth of resident memory per transition."""
    sb3_rss_bytes: float
    usage_bytes: float
    """Bytes per transition, as ``memory_usage()`` reports them."""
    memory_transitions: int
    fixed_cost: float
    """Bytes that the first use of the library takes, beyond those that SB3's buffer takes."""

    @property
    def group(self) -> str:
        return group_of(self.name)

    @property
    def targets(self) -> Targets:
        return targets_of(self.group, self.method)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", default=",".join(WORKLOADS), help=f"workloads, {', '.join(WORKLOADS)} or held-out")
    parser.add_argument("--methods", default="auto", help='such as "auto,delta,auto prefer=memory" (default: auto)')
    parser.add_argument("--transitions", type=int, help=f"transitions in a buffer (default: {FULL.transitions})")
    parser.add_argument("--memory-transitions", type=int, help="measure memory with this many, in separate buffers")
    parser.add_argument("--rounds", type=int, help=f"turns of each buffer (default: {FULL.rounds})")
    parser.add_argument("--quick", action="store_true", help="smaller buffers and fewer turns")
    parser.add_argument("--out", type=Path, help="folder for workloads.json and workloads.md")
    arguments = parser.parse_args()
    default = QUICK if arguments.quick else FULL
    effort = Effort(arguments.transitions or default.transitions, arguments.rounds or default.rounds, default.pairs)
    try:
        names = names_of(arguments.names.split(","))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    methods = arguments.methods.split(",")
    is_everything = names == names_of(WORKLOADS) and effort == FULL
    out: Path = arguments.out or RESULTS / ("quick" if arguments.quick else "workloads" if is_everything else "partial")
    out.mkdir(parents=True, exist_ok=True)

    run, began = describe_run("workloads"), time.perf_counter()
    rows: list[Row] = []
    failures: dict[str, str] = {}
    for name in tqdm(names, "workloads", disable=None):
        try:
            load_recording(name, effort.recorded_steps, N_ENVS)
        except MissingPeerError as error:
            failures[name] = str(error)
            continue
        found, failed = measure(name, methods, effort, arguments.memory_transitions)
        rows += found
        failures |= failed
        run["seconds"] = round(time.perf_counter() - began)
        write(out, run, rows, failures)
    print((out / "workloads.md").read_text())
    print(f"Results are in {out}.", file=sys.stderr)
    return 1 if failures else 0


def names_of(words: Iterable[str]) -> list[str]:
    """The names of workloads, with each group replaced by its workloads."""
    groups = {**WORKLOADS, "held-out": HELD_OUT}
    names = list(chain(*(groups.get(word, (word,)) for word in words)))
    unknown = [name for name in names if name not in ENVIRONMENTS]
    if unknown:
        known = ", ".join([*groups, *ENVIRONMENTS])
        raise ValueError(f"unknown workload {', '.join(unknown)}; known are {known}")
    return names


def group_of(name: str) -> str:
    kind = ENVIRONMENTS[name].kind
    return {"vector": "vectors", "mask": "rgb"}.get(kind, kind)


def measure(
    name: str, methods: Sequence[str], effort: Effort, memory_transitions: int | None
) -> tuple[list[Row], dict[str, str]]:
    """Measure all methods on one workload. Return one row per method, and what failed."""
    subjects = [SB3, *(f"ours:{method}" for method in methods)]
    stream = Stream(name, effort.transitions // N_ENVS, N_ENVS, effort.recorded_steps, N_ENVS)
    with Workers(subjects, name) as workers:
        workers.at_once("make", stream=asdict(stream))
        fixed = workers.at_once("fixed_cost")
        # One after the other: while SB3's large arrays cause page faults, those of other processes take longer.
        filled = {who: found[0] for who, found in workers.in_turn(1, "fill_and_watch", steps=stream.steps).items()}
        # This overwrites what was stored before auto had chosen, as soon happens in any buffer in use.
        unsettled = max(workers.at_once("steps_until_settled").values(), default=0)
        workers.at_once("fill", steps=max(stream.steps, unsettled))
        memory, usage = workers.at_once("growth"), workers.at_once("usage")
        turns = {
            size: workers.in_turn(effort.rounds, "add_and_sample", batch_size=size, times=effort.pairs)
            for size in BATCH_SIZES
        }
        failures = dict(workers.failures)
    counted = stream.transitions
    needed = memory_transitions or counted
    if group_of(name) == "vectors" and not memory_transitions:
        needed = max(VECTOR_TRANSITIONS, round(VECTOR_BYTES / sb3_bytes(stream) * stream.transitions))
    if needed != counted and not failures:
        counted = needed // N_ENVS * N_ENVS
        memory, usage = measure_memory(name, subjects, counted)
    if SB3 in failures:
        return [], {f"{name}, {subject}": reason for subject, reason in failures.items()}
    rows = [
        make_row(
            name,
            subject,
            filled,
            turns,
            {one: total / counted for one, total in memory.items()},
            usage[subject],
            counted,
            fixed,
        )
        for subject in subjects[1:]
        if subject not in failures
    ]
    return rows, {f"{name}, {subject}": reason for subject, reason in failures.items()}


def measure_memory(name: str, subjects: Sequence[str], transitions: int) -> tuple[dict[str, float], dict[str, Any]]:
    """How much fresh processes grow by. If SB3's buffer does not fit in memory, the size of its arrays is taken."""
    steps = transitions // N_ENVS
    stream = Stream(name, steps, N_ENVS, min(steps, longest_recording(name, N_ENVS)), N_ENVS)
    arrays = sb3_bytes(stream)
    measured = [subject for subject in subjects if subject != SB3 or arrays < psutil.virtual_memory().available / 2]
    with Workers(measured, name) as workers:
        workers.at_once("make", stream=asdict(stream))
        workers.at_once("fill", steps=stream.steps)
        return {SB3: arrays, **workers.at_once("growth")}, workers.at_once("usage")


def sb3_bytes(stream: Stream) -> float:
    """Bytes of the arrays in SB3's buffer."""
    from sb3_extra_buffers.measure.buffers import Task

    recording = stream.recording
    task = Task("Replay", recording.observation_space, recording.action_space, recording.n_envs)
    return task.sb3_bytes(stream.transitions)


def make_row(
    name: str,
    subject: str,
    filled: dict[str, dict[str, Any]],
    turns: dict[int, dict[str, list[dict[str, list[float]]]]],
    memory: dict[str, float],
    usage: dict[str, Any],
    memory_transitions: int,
    fixed: dict[str, int],
) -> Row:
    def calls(who: str) -> list[float]:
        return list(chain(*(turn["add"] for size in BATCH_SIZES for turn in turns[size][who])))

    def each_turn(who: str) -> dict[str, list[float]]:
        # Codecs work in bursts, so add is averaged over a turn. sample() has no bursts, and its median is less noisy.
        adds = [float(np.mean(turn["add"])) for size in BATCH_SIZES for turn in turns[size][who]]
        samples = {size: [float(np.median(turn["sample"])) for turn in turns[size][who]] for size in BATCH_SIZES}
        return {"add": adds, **{f"sample({size})": found for size, found in samples.items()}}

    reference, ours = each_turn(SB3), each_turn(subject)
    longest_later = max(calls(subject))
    longest_first = filled[subject]["slowest"][0]
    return Row(
        name=name,
        method=subject.partition(":")[2],
        chosen=usage["method"],
        why=usage["why"],
        times={what: {SB3: Figure.of(reference[what]), "ours": Figure.of(ours[what])} for what in ours},
        ratios={
            what: Figure.of([one / other for one, other in zip(reference[what], ours[what], strict=True)])
            for what in ours
        },
        add_p99=float(np.percentile(calls(subject), 99)),
        sb3_add_p99=float(np.percentile(calls(SB3), 99)),
        longest_add=max(longest_later, longest_first["time"]),
        longest_at="full" if longest_later > longest_first["time"] else f"step {longest_first['step']}",
        sb3_longest_add=max(*calls(SB3), filled[SB3]["max"]),
        rss_bytes=memory[subject],
        sb3_rss_bytes=memory[SB3],
        usage_bytes=usage["bytes"],
        memory_transitions=memory_transitions,
        fixed_cost=fixed[subject] - fixed[SB3],
    )


def describe_run(study: str) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.studies.{study}", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load": round(psutil.getloadavg()[0], 1),
    }


def write(out: Path, run: dict[str, Any], rows: Sequence[Row], failures: dict[str, str]) -> None:
    results = {"run": run, "rows": [asdict(row) for row in rows], "failures": failures}
    (out / "workloads.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "workloads.md").write_text(page(run, rows, failures))


def page(run: dict[str, Any], rows: Sequence[Row], failures: dict[str, str]) -> str:
    """The table, and whether the targets of each group are met."""
    load = f"load {run['load']} at the start"
    parts = [
        f"`{run['command']}` on {run['date']}: {run['machine']}, {load}, {run.get('seconds', 0)} s.",
        table(rows),
        *(f"- {line}" for line in summary(rows)),
        *(f"- **Failed:** {name}: {reason.splitlines()[0]}" for name, reason in failures.items()),
    ]
    return "\n\n".join(parts[:2]) + "\n\n" + "\n".join(parts[2:]) + "\n"


def table(rows: Sequence[Row]) -> str:
    heads = (
        "workload",
        "method",
        "`add` full, µs: SB3 → ours (ratio)",
        "`add` 99% / longest, µs",
        "`sample(32)`, µs",
        "`sample(256)`, µs",
        "bytes: RSS / `memory_usage()` of SB3's",
        "in use",
    )
    lines = []
    for row in rows:
        targets = row.targets
        limit = targets.limit_of(row.name)
        is_small = limit is None or is_within(row.rss_bytes, row.sb3_rss_bytes, limit)
        cells = [
            row.name,
            row.method,
            _speed(row, "add", targets.add),
            f"{row.add_p99:,.0f} / {row.longest_add:,.0f} at {row.longest_at} {mark(row.longest_add <= PAUSE)}",
            _speed(row, "sample(32)", targets.sample_32),
            _speed(row, "sample(256)", targets.sample_256),
            f"{row.rss_bytes:,.0f} / {row.usage_bytes:,.0f} of {row.sb3_rss_bytes:,.0f}"
            f" ({row.rss_bytes / row.sb3_rss_bytes:.3f}) {mark(is_small)}",
            _in_use(row.chosen),
        ]
        lines.append(cells)
    return markdown_table(heads, lines)


def summary(rows: Sequence[Row]) -> list[str]:
    """For each group and method: how many workloads meet each target."""
    lines = []
    for group, method in dict.fromkeys((row.group, row.method) for row in rows):
        members = [row for row in rows if (row.group, row.method) == (group, method)]
        targets = targets_of(group, method)
        wanted = {"add": targets.add, "sample(32)": targets.sample_32, "sample(256)": targets.sample_256}
        met = [
            f"{what} ≥ {least}×: {sum(row.ratios[what].median >= least for row in members)}"
            for what, least in wanted.items()
        ]
        met.append(f"no add over {PAUSE / 1e3:.0f} ms: {sum(row.longest_add <= PAUSE for row in members)}")
        for limit, count in ((targets.most_bytes, len(members)), (targets.usual_bytes, targets.usual_count)):
            if limit is not None:
                small = sum(is_within(row.rss_bytes, row.sb3_rss_bytes, limit) for row in members)
                what = f"{limit:.3g} of SB3's" if limit < 1 else f"{limit:,.0f} bytes"
                met.append(f"≤ {what}: {small} (target {count})")
        fixed = np.median([row.fixed_cost for row in members]) / 1e6
        lines.append(f"{group}, `{method}`, of {len(members)}: {'; '.join(met)}. First use takes {fixed:.0f} MB.")
    return lines


def _in_use(method: str) -> str:
    """``key: method, key: method`` of a Dict, shortened if all keys have the same method."""
    methods = {part.partition(": ")[2] for part in method.split(", ")} if ": " in method else {method}
    return f"{methods.pop()}, all keys" if ": " in method and len(methods) == 1 else method


def mark(is_met: bool) -> str:
    return MET if is_met else MISSED


def _speed(row: Row, what: str, least: float) -> str:
    ratio = row.ratios[what]
    spread = (ratio.high - ratio.low) / 2
    times = row.times[what]
    ends = f"{times[SB3].median:,.0f} → {times['ours'].median:,.0f}"
    return f"{ends} ({ratio.median:.2f} ±{spread:.2f}) {mark(ratio.median >= least)}"


if __name__ == "__main__":
    sys.exit(main())
