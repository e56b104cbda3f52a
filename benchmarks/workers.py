"""Start one process per subject, which runs :mod:`benchmarks.worker`, and send requests to them in turn."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from benchmarks import CACHE
from benchmarks.peers import python_for
from benchmarks.subjects import library_of

ROOT = Path(__file__).parent.parent
LIMIT_SECONDS = 900.0
"""The longest that one request may take."""
REST_SECONDS = 0.02
"""Pause between two turns: OpenMP threads of a subject spin for some milliseconds after its turn."""


class WorkerError(RuntimeError):
    """A subject failed; the message names it and says what it was doing."""


class Worker:
    """One subject in a fresh process.

    :param variables: Further environment variables.
    """

    def __init__(self, subject: str, variables: Mapping[str, str] | None = None) -> None:
        self.subject = subject
        self.doing = "starting"
        peers = library_of(subject).peers
        # Not in /tmp, which may be in memory. Removed by this process, because workers are killed.
        CACHE.mkdir(exist_ok=True)
        self.scratch = tempfile.TemporaryDirectory(dir=CACHE)
        environment = {
            **os.environ,
            "PYTHONWARNINGS": "ignore",
            "TMPDIR": self.scratch.name,
            **(variables or {}),
        }
        if peers is not None:
            environment.pop("PYTHONPATH", None)  # it may contain this library
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # close() does
        self.process = subprocess.Popen(
            [str(python_for(peers)), "-m", "benchmarks.worker", subject],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def send(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.doing = do
        with contextlib.suppress(BrokenPipeError):  # receive() reports why the process ended
            self.process.stdin.write(json.dumps({"do": do, "with": arguments}) + "\n")
            self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        watchdog = threading.Timer(LIMIT_SECONDS, self.process.kill)
        watchdog.start()
        try:
            line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            status = self.process.wait()
            raise WorkerError(f"{self.subject}: the process ended ({status}) while {self.doing}\n{self._error_tail()}")
        answer = json.loads(line)
        if "error" in answer:
            # Results are published, so leave out the path of the temporary folder.
            reason = answer["error"].replace(self.scratch.name, "...")
            raise WorkerError(f"{self.subject}: {self.doing} failed: {reason}")
        return answer["result"]

    def ask(self, do: str, **arguments: Any) -> Any:
        self.send(do, **arguments)
        return self.receive()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()  # it has nothing to save
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):  # of requests that it never read
            self.process.stdin.close()
        self.process.stdout.close()
        self.errors.close()
        self.scratch.cleanup()

    def _error_tail(self) -> str:
        self.errors.seek(0)
        return "".join(self.errors.readlines()[-5:]).rstrip()


class Workers:
    """Subjects that are measured together. One that fails drops out; :attr:`failures` says why."""

    def __init__(self, subjects: Sequence[str], title: str, variables: Mapping[str, str] | None = None) -> None:
        self.title = title
        self.failures: dict[str, str] = {}
        self.workers = [Worker(subject, variables) for subject in subjects]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in self.workers:
            worker.close()

    def at_once(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a request to all workers at once, and wait for the answers. For requests that are not timed."""
        for worker in self.workers:
            worker.send(do, **arguments)
        return self._collect(self.workers)

    def in_turn(self, rounds: int, do: str, **arguments: Any) -> dict[str, list[Any]]:
        """Send a request to one worker after the other, ``rounds`` times, each time starting with another worker."""
        found: dict[str, list[Any]] = {worker.subject: [] for worker in self.workers}
        for round_number in tqdm(range(rounds), f"{self.title}: {do}", leave=False, disable=None):
            first = round_number % max(len(self.workers), 1)
            for worker in self.workers[first:] + self.workers[:first]:
                worker.send(do, **arguments)
                for subject, result in self._collect([worker]).items():
                    found[subject].append(result)
                time.sleep(REST_SECONDS)
        return {subject: results for subject, results in found.items() if subject not in self.failures}

    def _collect(self, workers: list[Worker]) -> dict[str, Any]:
        found = {}
        for worker in list(workers):
            try:
                found[worker.subject] = worker.receive()
            except WorkerError as error:
                self.failures[worker.subject] = str(error)
                self.workers.remove(worker)
                worker.close()
        return found
