"""Memory and speed of our buffer with several methods, next to SB3's, on the same transitions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from stable_baselines3.common.buffers import ReplayBuffer
from tqdm import tqdm

from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.errors import CapacityError
from sb3_extra_buffers.measure.buffers import SB3, make_replay_buffer, sb3_bytes
from sb3_extra_buffers.measure.memory import available_memory, settled_rss
from sb3_extra_buffers.measure.processes import run_in_fresh_process
from sb3_extra_buffers.measure.transitions import TransitionFile
from sb3_extra_buffers.storage.usage import readable

_WARM_UP_STEPS = 200
_RSS_RESOLUTION = 1 << 18
"""Smaller growth of resident memory is noise: it is counted in pages. The buffer's own accounting is used instead."""


@dataclass(frozen=True)
class Memory:
    """How many bytes a fresh process grew by when a buffer stored the transitions."""

    method: str
    codec: str
    """What compresses: for ``auto``, the method that it chose."""
    transitions: int
    """How many transitions the buffer held in the end."""
    measured: int
    bytes_per_transition: float
    """What one more transition would take."""

    def for_buffer_of(self, size: int) -> float:
        """Bytes for ``size`` transitions, extrapolated if fewer were measured."""
        return self.measured + self.bytes_per_transition * max(0, size - self.transitions)


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    memory: Memory
    buffer_bytes: float
    """Memory for the buffer size that the user asked for."""
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
    """What was measured; the first result is SB3's."""

    data: TransitionFile
    buffer_size: int
    batch_size: int
    results: list[Result]

    @property
    def sb3(self) -> Result:
        return self.results[0]

    @property
    def is_extrapolated(self) -> bool:
        return self.buffer_size > self.data.transition_count


def compare(
    data: TransitionFile, methods: Sequence[str], buffer_size: int, batch_size: int, repeats: int
) -> Comparison:
    """Measure memory in one fresh process per method, then the speed of all buffers, interleaved, in this process."""
    held = min(buffer_size, data.transition_count)
    needed, available = sb3_bytes(held, data.observation_space, data.action_space), available_memory()
    if needed > 0.8 * available:
        raise CapacityError(
            f"SB3's buffer needs {readable(needed)} for {held:,} transitions, but only {readable(available)} are "
            "available. Use fewer --steps."
        )
    everyone = [SB3, *methods]
    with tqdm(everyone, "memory", unit="process") as bar:
        memories = [run_in_fresh_process(measure_memory, method, data, buffer_size) for method in bar]
    buffers = {
        method: make_replay_buffer(method, held, data.observation_space, data.action_space, data.n_envs)
        for method in everyone
    }
    times = time_replay_buffers(buffers, data.read(), data.steps, [batch_size], repeats)
    results = [
        Result(
            memory,
            buffer_bytes=memory.for_buffer_of(buffer_size),
            add=times[memory.method]["add"],
            sample=times[memory.method][f"sample({batch_size})"],
        )
        for memory in memories
    ]
    return Comparison(data, buffer_size, batch_size, results)


def measure_memory(method: str, data: TransitionFile, buffer_size: int) -> Memory:
    """Measure how a buffer for ``buffer_size`` transitions grows. Call it in a fresh process."""
    if method == SB3:  # its arrays may not fit in memory, and grow alike whatever their size
        buffer_size = min(buffer_size, data.transition_count)
    arguments = (data.observation_space, data.action_space, data.n_envs)
    # A small buffer first, so that imports, compiled kernels and the allocator's pools do not count.
    buffer = make_replay_buffer(method, _WARM_UP_STEPS * data.n_envs, *arguments)
    for transition in data.read(_WARM_UP_STEPS):
        buffer.add(*transition)
    del buffer

    before = settled_rss()
    buffer = make_replay_buffer(method, buffer_size, *arguments)
    resident, accounted = [], []
    half = data.steps // 2
    for step, transition in enumerate(data.read(), 1):
        buffer.add(*transition)
        if step in (half, data.steps):
            resident.append(settled_rss() - before)
            accounted.append(_accounted_bytes(buffer))
    added = (data.steps - half) * data.n_envs
    growth = resident[-1] - resident[0]
    if growth < _RSS_RESOLUTION:
        growth = accounted[-1] - accounted[0]
    codec = buffer.memory_usage().method if isinstance(buffer, BaseCompressedBuffer) else "none"
    return Memory(method, codec, buffer.size() * data.n_envs, max(resident[-1], accounted[-1]), growth / added)


def _accounted_bytes(buffer: ReplayBuffer) -> int:
    if isinstance(buffer, BaseCompressedBuffer):
        return buffer.memory_usage().total
    return sb3_bytes(buffer.size() * buffer.n_envs, buffer.observation_space, buffer.action_space)


def time_replay_buffers(
    buffers: Mapping[str, ReplayBuffer],
    transitions: Iterable[Sequence[Any]],
    steps: int,
    batch_sizes: Sequence[int],
    repeats: int,
) -> dict[str, dict[str, float]]:
    """Microseconds of ``"add"`` and, for each batch size, of ``"sample(32)"``, for each buffer.

    Calls are interleaved, so that all buffers see the same machine load. ``sample`` is the median of ``repeats`` calls.
    ``add`` is the mean, because codecs work in bursts: they encode once in several steps. The slowest hundredth of its
    calls, in which other processes took the core, does not count.
    """
    times: dict[str, dict[str, list[float]]] = {name: {"add": []} for name in buffers}
    order = list(buffers)
    for transition in tqdm(transitions, "add", total=steps, unit="step"):
        order.append(order.pop(0))
        for name in order:
            times[name]["add"].append(_microseconds(buffers[name].add, *transition))
    for batch_size in batch_sizes:
        for repeat in tqdm(range(repeats), f"sample({batch_size})"):
            order.append(order.pop(0))
            for name in order:
                np.random.seed(repeat)
                elapsed = _microseconds(buffers[name].sample, batch_size)
                times[name].setdefault(f"sample({batch_size})", []).append(elapsed)
    return {
        name: {
            call: statistics.fmean(sorted(values)[: max(1, len(values) * 99 // 100)])
            if call == "add"
            else statistics.median(values)
            for call, values in calls.items()
        }
        for name, calls in times.items()
    }


def _microseconds(function: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    function(*arguments)
    return 1e6 * (time.perf_counter() - start)
