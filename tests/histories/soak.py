"""Run long histories for minutes to hours, with all classes, methods and worlds, including real games.

    make soak MINUTES=30 SEED=7
    python -m tests.histories.soak --minutes 30 --seed 7
    python -m tests.histories.soak --repeat 'CompressedReplayBuffer:delta:Enduro:3000:12'

Prints its progress and a summary. For each failed history, prints the command that repeats it, and exits with 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

REPORT_SECONDS = 10
STEPS = (300, 1000, 3000)
GAME_STEPS = 2500
REAL_GAMES = 0.2
"""The share of histories that play real games, among classes that can."""


class Outcome(NamedTuple):
    """The outcome of one history."""

    name: str
    steps: int
    seconds: float
    visits: dict[str, int]
    error: str | None


def names(seed: int, only: str = "") -> Iterator[str]:
    """Endless names of histories: every class and method in turn, in random worlds."""
    from tests.histories.plans import methods_of, worlds_of
    from tests.histories.real_games import ATARI, VECTORS
    from tests.histories.short import BUFFERS

    rng = np.random.default_rng(seed)
    pairs = [(buffer, method) for buffer in BUFFERS if only in buffer for method in methods_of(buffer)]
    if not pairs:
        raise ValueError(f"No buffer class has {only!r} in its name. The classes are: {', '.join(BUFFERS)}.")
    games = (*VECTORS, *(ATARI if importlib.util.find_spec("ale_py") else ()))
    for number in itertools.count():
        for at in rng.permutation(len(pairs)).tolist():
            buffer, method = pairs[at]
            plays = not any(word in buffer for word in ("Dict", "Her", "Maskable")) and rng.random() < REAL_GAMES
            world = str(rng.choice(games if plays else worlds_of(buffer)))
            steps = GAME_STEPS if plays else int(rng.choice(STEPS))
            yield f"{buffer}:{method}:{world}:{steps}:{seed * 1_000_000 + number}"


def run(name: str, path: str | None = None) -> Outcome:
    """Run one history."""
    from tests.histories.plans import Name
    from tests.histories.running import run_history
    from tests.histories.visits import Visits

    began, visits, error = time.monotonic(), Visits(), None
    parsed = Name.parse(name)
    try:
        run_history(parsed, visits, path)
    except Exception as failure:
        cause = "".join(traceback.format_exception(failure.__cause__ or failure)[-6:])
        error = f"{failure}\n{cause}"
    return Outcome(name, parsed.steps, time.monotonic() - began, dict(visits), error)


def _start_worker() -> None:
    """Set up a worker process, which uses one core."""
    import signal

    import torch as th

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent process handles Ctrl-C
    th.set_num_threads(1)


class Summary:
    """The results so far."""

    def __init__(self, seed: int) -> None:
        self.seed, self.began = seed, time.monotonic()
        self.steps = 0
        self.histories: Counter[str] = Counter()
        self.methods: Counter[str] = Counter()
        self.visits: Counter[str] = Counter()
        self.failures: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        buffer, method, *_ = outcome.name.split(":")
        self.steps += outcome.steps
        self.histories[buffer] += 1
        self.methods[method] += 1
        self.visits.update(outcome.visits)
        if outcome.error is not None:
            self.failures.append(outcome)

    def line(self) -> str:
        visits = ", ".join(f"{count:,} {kind}" for kind, count in self.visits.most_common() if count)
        seconds = int(time.monotonic() - self.began)
        return (
            f"{seconds // 60:3}:{seconds % 60:02}  {self.histories.total():,} histories, {self.steps:,} steps, "
            f"{len(self.failures)} failed, seed {self.seed}; {visits}"
        )

    def text(self) -> str:
        seconds = time.monotonic() - self.began
        lines = [
            f"seed {self.seed}, {seconds / 60:.1f} minutes, {self.histories.total():,} histories of "
            f"{self.steps:,} steps, {len(self.failures)} failed",
            "",
            *(f"{count:>9,}  {kind}" for kind, count in self.visits.most_common()),
            "",
            *(f"{count:>9,}  {buffer}" for buffer, count in sorted(self.histories.items())),
            "",
            *(f"{count:>9,}  {method}" for method, count in sorted(self.methods.items())),
        ]
        for failure in self.failures:
            lines += ["", f"FAILED {failure.name}", str(failure.error)]
        return "\n".join(lines) + "\n"


def soak(minutes: float, seed: int, processes: int, only: str = "", most_failures: int = 20) -> Summary:
    """Run histories until the time is up, Ctrl-C is pressed, or too many have failed."""
    summary, deadline = Summary(seed), time.monotonic() + 60 * minutes
    next_report = time.monotonic() + REPORT_SECONDS
    waiting = names(seed, only)
    # Not forked, because some classes start threads.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _start_worker)
    running: set[Future[Outcome]] = set()
    try:
        while running or time.monotonic() < deadline:
            while len(running) < processes and time.monotonic() < deadline:
                running.add(pool.submit(run, next(waiting)))
            done, running = wait(running, timeout=REPORT_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                outcome = future.result()
                summary.add(outcome)
                if outcome.error is not None:
                    print(f"FAILED {outcome.name}\n{outcome.error}", flush=True)
            if len(summary.failures) >= most_failures:
                print(f"{len(summary.failures)} histories failed: stopping.")
                deadline = 0.0
            if time.monotonic() >= next_report:
                print(summary.line(), flush=True)
                next_report = time.monotonic() + REPORT_SECONDS
    except KeyboardInterrupt:
        print("Interrupted: waiting for the running histories.")
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return summary


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.histories.soak", description="Compare buffers with SB3's over long histories."
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="when to stop (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seeds differ in their histories (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: %(default)s, one per core")
    parser.add_argument("--only", default="", metavar="TEXT", help="only buffer classes whose name contains this")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="also write the summary to this file")
    parser.add_argument("--repeat", metavar="NAME", help="repeat one history, by the name that a failure printed")
    parser.add_argument(
        "--path",
        choices=["arrays", "tensors", "kernels", "cuda", "segments"],
        help="with --repeat: how steps reach the buffer",
    )
    given = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") and given.path == "kernels":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if given.repeat:
        outcome = run(given.repeat, given.path)
        print(outcome.error or f"{outcome.name}: the same as SB3's, {json.dumps(outcome.visits)}")
        return int(outcome.error is not None)
    summary = soak(given.minutes, given.seed, given.processes, given.only)
    print(summary.text())
    if given.summary is not None:
        given.summary.parent.mkdir(parents=True, exist_ok=True)
        given.summary.write_text(summary.text(), encoding="utf-8")
    return int(bool(summary.failures))


if __name__ == "__main__":
    sys.exit(main())
