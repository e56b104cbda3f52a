"""The process that measures one subject. It reads a JSON request per line, and writes a JSON answer per line.

It may run in another virtual environment than the suite, so it imports this library only in the adapter and in the
requests that need it. :mod:`benchmarks.workers` starts it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.recordings import Transition
from benchmarks.streams import Stream
from benchmarks.subjects import Subject, library_of, make_subject
from benchmarks.subjects.base import Array

WARM_UP_STEPS = 600
"""Steps of each environment in a small buffer, before a measurement. By then, code that is compiled or loaded on demand
is ready. The buffer that is measured begins anew: see :meth:`Measurements.steps_until_settled`."""
SETTLE_STEPS = 50
"""Steps that are played without a buffer, so that the memory that playback needs is allocated before it is measured."""


@dataclass
class Measurements:
    """The requests that a worker answers. Times are in microseconds unless stated otherwise."""

    subject: str
    stream: Stream = field(init=False)
    buffer: Subject = field(init=False)
    playing: Iterator[Transition] = field(init=False)
    memory_unused: int = field(init=False)
    memory_before: int = field(init=False)
    stored: Array = field(init=False)
    """Checksums of the transitions that were added with ``remember``."""
    n_stored: int = field(init=False)
    one_rollout: Callable[[], None] = field(init=False)
    model: Any = field(init=False)
    clock: Any = field(init=False)

    def load_library(self) -> str:
        """Import the library, and return its version."""
        return library_of(self.subject).load().version()

    def make(self, stream: dict[str, Any]) -> None:
        """Create a buffer for a whole stream, after using and dropping a smaller one to warm up."""
        self.stream = Stream(**stream)
        library_of("sb3").load()  # the memory of torch and SB3 must not count
        self.memory_unused = resident_bytes()
        self._warm_up()
        self.playing = self.stream.play(1 + SETTLE_STEPS + 4 * self.stream.steps)
        next(self.playing)
        # Allocated and written to before memory is measured, because it is not the buffer's.
        self.stored, self.n_stored = np.full(2 * self.stream.transitions, 1, dtype=np.uint32), 0
        give_back_memory()
        for _ in islice(self.playing, SETTLE_STEPS):  # allocates again what playback needs
            pass
        # Otherwise Python searches all objects of torch for garbage now and then, which takes some milliseconds.
        gc.freeze()
        self.memory_before = resident_bytes()
        self.buffer = make_subject(self.subject, self.stream.task(self.stream.steps))
        np.random.seed(0)  # the same batches from all buffers that draw like SB3

    def _warm_up(self) -> None:
        steps = min(WARM_UP_STEPS, self.stream.steps)
        buffer = make_subject(self.subject, self.stream.task(steps))
        for step in self.stream.play(steps + steps // 4):
            buffer.add(step)
        buffer.sample(32)

    def fill(self, steps: int, remember: bool = False) -> float:
        """Add steps, and return the mean time of one. Codecs work in bursts, which a median would hide."""
        spent = 0.0
        for step in islice(self.playing, steps):
            began = time.perf_counter()
            self.buffer.add(step)
            spent += time.perf_counter() - began
            if remember:
                found = _fingerprints(step.obs, step.next_obs)
                self.stored[self.n_stored : self.n_stored + len(found)] = found
                self.n_stored += len(found)
        return 1e6 * spent / steps

    def fill_and_watch(self, steps: int) -> dict[str, Any]:
        """Add steps, and return how the times of single calls are distributed."""
        times = [_timed(self.buffer.add, step) for step in islice(self.playing, steps)]
        slowest = sorted(range(len(times)), key=times.__getitem__)[-3:][::-1]
        return {
            **dict(zip(("p50", "p99", "p99.9"), np.percentile(times, (50, 99, 99.9)).tolist(), strict=True)),
            "mean": float(np.mean(times)),
            "max": max(times),
            "slowest": [{"step": step, "time": times[step]} for step in slowest],
        }

    def add_and_sample(self, batch_size: int, times: int) -> dict[str, list[float]]:
        """Alternate ``add`` and ``sample``, as training does, and return the time of each call."""
        added, sampled = [], []
        batch: Any = None

        def sample(batch_size: int) -> None:
            # As in SB3's training loops, the previous batch is freed only when the new one exists.
            nonlocal batch
            batch = self.buffer.sample(batch_size)

        for step in islice(self.playing, times):
            added.append(_timed(self.buffer.add, step))
            sampled.append(_timed(sample, batch_size))
        return {"add": added, "sample": sampled}

    def fixed_cost(self) -> int:
        """Growth of resident memory by the first use of the library, without the contents of a buffer, in bytes."""
        return self.memory_before - self.memory_unused

    def usage(self) -> dict[str, Any] | None:
        return self.buffer.usage()

    def steps_until_settled(self) -> int:
        """The most steps until the buffer keeps its method. Until then, memory is not that of a buffer in use."""
        return steps_until_settled(getattr(self.buffer, "buffer", None))

    def growth(self) -> int:
        """Growth of resident memory since the buffer was created, in bytes."""
        gc.collect()
        return resident_bytes() - self.memory_before

    def payload_per_frame(self) -> float | None:
        return self.buffer.payload_per_frame()

    def sample(self, batch_size: int, times: int) -> list[float]:
        spent = []
        for _ in range(times):
            began = time.perf_counter()
            self.buffer.sample(batch_size)
            spent.append(1e6 * (time.perf_counter() - began))
        return spent

    def wrong_rows(self, batch_size: int) -> float:
        """The share of a batch that is none of the remembered transitions."""
        found = _fingerprints(*self.buffer.observations(self.buffer.sample(batch_size)))
        return float(np.mean(~np.isin(found, self.stored[: self.n_stored])))

    def save_and_load(self) -> dict[str, float]:
        """The milliseconds to save and to load, and the size of the files in bytes."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "saved"
            began = time.perf_counter()
            self.buffer.save(path)
            saved = time.perf_counter()
            files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
            size = sum(file.stat().st_size for file in files)
            before_load = time.perf_counter()
            self.buffer.load(path)
            loaded = time.perf_counter()
            self.buffer.sample(32)
        return {"save": 1e3 * (saved - began), "load": 1e3 * (loaded - before_load), "size": size}

    def make_rollouts(self, stream: dict[str, Any], epochs: int, batch_size: int) -> None:
        """Create a rollout buffer, and use it until code is loaded and ``auto`` has settled on a method."""
        from benchmarks.subjects.sb3 import Sb3Like

        self.stream = Stream(**stream)
        subject = make_subject(self.subject, self.stream.task(1))
        assert isinstance(subject, Sb3Like)
        buffer = subject.rollout_buffer(self.stream.steps)
        steps = list(self.stream.play(self.stream.steps))
        self.one_rollout = partial(subject.rollout, buffer, steps, epochs, batch_size)
        self.rollouts(-(-WARM_UP_STEPS // self.stream.steps))
        self.rollouts(-(-steps_until_settled(buffer) // self.stream.steps))

    def rollouts(self, times: int) -> list[float]:
        """Milliseconds to fill the rollout buffer and to read it, for each time."""
        spent = []
        for _ in range(times):
            began = time.perf_counter()
            self.one_rollout()
            spent.append(1e3 * (time.perf_counter() - began))
        return spent

    def train(self, algorithm: str, steps: int) -> dict[str, Any]:
        from benchmarks.sections.training import train

        return train(algorithm, self.subject, steps)

    def make_model(self, algorithm: str) -> None:
        from benchmarks.sections.training import BufferClock, make_model

        self.model = make_model(algorithm, compressed=self.subject != "sb3")
        self.clock = BufferClock(self.model)

    def train_on(self, steps: int) -> dict[str, float]:
        """Train for more steps. Return the seconds, the part of them spent in the buffer, and the number of steps."""
        before, began, in_buffer = self.model.num_timesteps, time.perf_counter(), self.clock.seconds
        self.model.learn(steps, reset_num_timesteps=before == 0)
        return {
            "seconds": time.perf_counter() - began,
            "in_buffer": self.clock.seconds - in_buffer,
            "steps": self.model.num_timesteps - before,
        }

    def network(self) -> str:
        """A checksum of the trained network."""
        from sb3_extra_buffers.measure.training import hash_of

        return hash_of(self.model.policy)


def steps_until_settled(buffer: Any) -> int:
    """The most steps until a buffer that chooses its method keeps it; 0 for buffers that do not choose one."""
    return buffer.memory_usage().steps_until_settled if hasattr(buffer, "memory_usage") else 0


def _timed(function: Callable[[Any], Any], argument: Any) -> float:
    """Microseconds of one call: wall time, or the CPU time of all threads if that is less.

    So it does not count when another process has the core.
    """
    cpu_began = time.process_time()
    began = time.perf_counter()
    function(argument)
    elapsed = time.perf_counter() - began
    return 1e6 * min(elapsed, time.process_time() - cpu_began)


def _fingerprints(obs: Any, next_obs: Any) -> Array:
    """A checksum of each row; for images, of every 15th pixel."""
    arrays = [
        part for values in (obs, next_obs) for part in (values.values() if isinstance(values, dict) else [values])
    ]
    parts = [array[..., ::5, ::3] if array.ndim == 4 else array for array in arrays]
    found = []
    for row in zip(*parts, strict=True):
        checksum = 0
        for part in row:
            checksum = zlib.crc32(part.tobytes(), checksum)
        found.append(checksum)
    return np.array(found, np.uint32)


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def give_back_memory() -> None:
    """Return freed memory to the system, so that using it again counts as growth."""
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def main(subject: str) -> None:
    # Standard output carries only the answers. What libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    measurements = Measurements(subject)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(measurements, request["do"])(**request["with"])}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
