"""Measure memory and speed of SB3's buffer, and of ours with several methods, on the same transitions."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from sb3_extra_buffers.errors import CapacityError
from sb3_extra_buffers.measure.buffers import SB3, Task
from sb3_extra_buffers.measure.memory import available_memory, settled_rss
from sb3_extra_buffers.measure.processes import run_in_fresh_process
from sb3_extra_buffers.measure.transitions import Transition, TransitionFile
from sb3_extra_buffers.storage.usage import readable

_WARM_UP_STEPS = 200
"""Steps of all environments in the small buffer that is used and dropped before a measurement."""
_POINTS = 8
"""Number of memory measurements while a buffer is filled."""
_RSS_RESOLUTION = 1 << 18
"""In bytes. RSS growth below this is noise: the buffer's own accounting is used instead."""


class Point(NamedTuple):
    """The memory of a buffer at one moment."""

    transitions: int
    """Transitions in the buffer."""
    codec: str
    """The method in use; for ``auto``, its choice at that moment."""
    accounted: int
    """Bytes by the buffer's own accounting."""
    resident: int = 0
    """RSS growth of the process in bytes; 0 if not measured, or while ``auto`` has not settled on a method: it tries
    others in the same process, and their memory must not count."""
    settled_after: int = 0
    """Steps after which ``auto`` has settled on a method, at most; 0 if it has."""


@dataclass(frozen=True)
class Memory:
    """The memory of a buffer while it is filled."""

    method: str
    points: list[Point]

    @property
    def transitions(self) -> int:
        return self.points[-1].transitions

    @property
    def codec(self) -> str:
        return self.points[-1].codec

    @property
    def hint(self) -> str:
        """How to measure the method that ``auto`` settles on; empty if that one was measured."""
        steps = self.points[-1].settled_after
        return f"auto may still change its method: use --steps {steps} or more to measure its choice." if steps else ""

    @property
    def measured(self) -> int:
        """Bytes of the filled buffer."""
        return max(self.points[-1].resident, self.points[-1].accounted)

    @property
    def bytes_per_transition(self) -> float:
        """Bytes that one more transition would take, from the growth over the second half of the transitions.

        Growth before ``auto`` last changed its codec does not count, because later transitions use the new one.
        """
        last, points = self.points[-1], self.points[len(self.points) // 2 - 1 :]
        changed = max((i for i, point in enumerate(points) if point.codec != last.codec), default=-1)
        points = points[min(changed + 1, len(points) - 2) :]
        start = next((point for point in points if point.resident), last)
        growth = last.resident - start.resident
        if growth < _RSS_RESOLUTION:
            start = points[0]
            growth = last.accounted - start.accounted
        added = last.transitions - start.transitions
        # A rollout buffer that is filled for the second time holds no more transitions than before.
        return growth / added if added > 0 else self.measured / last.transitions

    def for_buffer_of(self, size: int) -> float:
        """Bytes of a buffer with ``size`` transitions, extrapolated if fewer were measured."""
        return self.measured + self.bytes_per_transition * max(0, size - self.transitions)


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    memory: Memory
    buffer_bytes: float
    """Memory for the requested buffer size."""
    add: float
    """Microseconds for one step of all environments."""
    sample: float
    """Microseconds for one batch."""

    @property
    def method(self) -> str:
        return self.memory.method

    @property
    def time(self) -> float:
        """Microseconds for one ``add`` and one ``sample``."""
        return self.add + self.sample


@dataclass(frozen=True)
class Comparison:
    """All results, SB3's first."""

    task: Task
    steps: int
    buffer_size: int
    batch_size: int
    results: list[Result]

    @property
    def sb3(self) -> Result:
        return self.results[0]

    @property
    def is_extrapolated(self) -> bool:
        return self.buffer_size > self.steps * self.task.n_envs


def compare(
    task: Task, data: TransitionFile, methods: Sequence[str], buffer_size: int, batch_size: int, repeats: int
) -> Comparison:
    """Measure memory in one fresh process per method, then the speed of all buffers in this process.

    Buffers are filled before their speed is measured, because they are full during most of a training run.
    """
    held = min(buffer_size, data.transition_count)
    needed, available = task.sb3_bytes(held), available_memory()
    if needed > 0.8 * available:
        raise CapacityError(
            f"SB3's buffer needs {readable(needed)} for {held:,} transitions, but only {readable(available)} of "
            f"memory is available. Use at most --steps {int(0.8 * available / needed * held) // task.n_envs}."
        )
    everyone = [SB3, *methods]
    with tqdm(everyone, "memory", unit="process") as bar:
        memories = [run_in_fresh_process(measure_memory, method, task, data, buffer_size) for method in bar]
    for method in everyone:
        warm_up(method, task, data)
    buffers = {method: task.make(method, held) for method in everyone}
    for buffer in tqdm(buffers.values(), "fill", unit="buffer"):
        fill(task, buffer, data.read(), data.steps)  # page faults of fresh memory must not count
    times = time_buffers(task, buffers, data.read(), data.steps, [batch_size], repeats)
    results = [
        Result(
            memory,
            buffer_bytes=memory.for_buffer_of(buffer_size),
            add=times[memory.method]["add"],
            sample=times[memory.method][f"sample({batch_size})"],
        )
        for memory in memories
    ]
    return Comparison(task, data.steps, buffer_size, batch_size, results)


def measure_memory(method: str, task: Task, data: TransitionFile, buffer_size: int) -> Memory:
    """Measure the RSS growth of a process that fills a buffer. Call this in a fresh process."""
    if method == SB3:  # the arrays of the full size may not fit in memory
        buffer_size = min(buffer_size, data.transition_count)
    warm_up(method, task, data)
    before = settled_rss()
    buffer = task.make(method, buffer_size)
    return Memory(method, fill(task, buffer, data.read(), data.steps, lambda: settled_rss() - before))


def warm_up(method: str, task: Task, data: TransitionFile) -> None:
    """Fill a small buffer, so that imports, compiling kernels and the allocator's pools do not count."""
    buffer = task.make(method, _WARM_UP_STEPS * task.n_envs)
    for transition in data.read(_WARM_UP_STEPS):
        task.add(buffer, transition)


def fill(
    task: Task,
    buffer: Any,
    transitions: Iterable[Transition],
    steps: int,
    resident: Callable[[], int] = lambda: 0,
) -> list[Point]:
    """Add ``steps`` steps of all environments, and measure memory at regular intervals and at the end.

    :param resident: Returns the RSS growth so far.
    """
    steps = _whole_rollouts(task, steps, buffer.buffer_size)
    points = []
    due = {max(1, steps * number // _POINTS) for number in range(1, _POINTS + 1)}
    for step, transition in enumerate(islice(transitions, steps), 1):
        task.add(buffer, transition)
        if step in due:
            held = (buffer.buffer_size if buffer.full else buffer.pos) * task.n_envs
            if hasattr(buffer, "memory_usage"):
                usage = buffer.memory_usage()
                if usage.steps_until_settled:
                    needed = _whole_rollouts(task, step + usage.steps_until_settled, buffer.buffer_size, math.ceil)
                    points.append(Point(held, usage.method, usage.total, settled_after=needed))
                else:
                    points.append(Point(held, usage.method, usage.total, resident()))
            else:
                points.append(Point(held, "none", task.sb3_bytes(held), resident()))
    return points


def time_buffers(
    task: Task,
    buffers: Mapping[str, Any],
    transitions: Iterable[Any],
    steps: int,
    batch_sizes: Sequence[int],
    repeats: int,
) -> dict[str, dict[str, float]]:
    """Time all buffers, and return microseconds by buffer and operation, such as ``"add"`` and ``"sample(32)"``.

    Calls are interleaved, so that all buffers see the same machine load. The time of ``sample`` is the median of
    ``repeats`` batches. The time of ``add`` is the mean, because codecs encode only once in several steps. The slowest
    1% of calls do not count, because another process may have had the core.
    """
    adds: dict[str, list[float]] = {name: [] for name in buffers}
    order = list(buffers)
    steps = _whole_rollouts(task, steps, buffers[order[0]].buffer_size)
    for transition in tqdm(islice(transitions, steps), "add", total=steps, unit="step"):
        order.append(order.pop(0))
        for name in order:
            adds[name].append(_microseconds(task.add, buffers[name], transition))
    times = {}
    for name, values in adds.items():
        times[name] = {"add": statistics.fmean(sorted(values)[: max(1, len(values) * 99 // 100)])}
    for batch_size in batch_sizes:
        batches = {name: task.batches(buffer, batch_size) for name, buffer in buffers.items()}
        samples: dict[str, list[float]] = {name: [] for name in buffers}
        for repeat in tqdm(range(repeats), f"sample({batch_size})"):
            order.append(order.pop(0))
            for name in order:
                np.random.seed(repeat)
                samples[name].append(_microseconds(next, batches[name]))
        for name, values in samples.items():
            times[name][f"sample({batch_size})"] = statistics.median(values)
    return times


def _whole_rollouts(task: Task, steps: int, n_slots: int, rounded: Callable[[float], int] = math.floor) -> int:
    """``steps``, by default rounded down, so that the last rollout is complete."""
    return steps if task.kind == "Replay" or steps < n_slots else rounded(steps / n_slots) * n_slots


def _microseconds(function: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    function(*arguments)
    return 1e6 * (time.perf_counter() - start)
