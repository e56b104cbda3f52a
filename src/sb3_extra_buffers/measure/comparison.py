"""Our buffer with several methods next to SB3's, on one play."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stable_baselines3.common.buffers import ReplayBuffer
from tqdm import tqdm

from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.errors import CapacityError
from sb3_extra_buffers.measure.memory import available_memory, settled_rss
from sb3_extra_buffers.measure.play_file import PlayFile
from sb3_extra_buffers.measure.processes import run_in_fresh_process
from sb3_extra_buffers.measure.subjects import SB3, make_replay_buffer, sb3_bytes
from sb3_extra_buffers.measure.timing import time_replay_buffers
from sb3_extra_buffers.storage.usage import readable

_WARM_UP_STEPS = 200


@dataclass(frozen=True)
class Memory:
    """Bytes by which a fresh process grew when a buffer was given a play."""

    subject: str
    method: str
    """What compresses: for ``auto``, what was chosen."""
    transitions: int
    """How many the buffer held in the end."""
    measured: int
    bytes_per_transition: float
    """What one more would take."""

    def for_buffer_of(self, size: int) -> float:
        """Bytes for ``size`` transitions like these: extrapolated, unless so many were measured."""
        return self.measured + self.bytes_per_transition * max(0, size - self.transitions)


@dataclass(frozen=True)
class Result:
    """A row of the table."""

    memory: Memory
    buffer_bytes: float
    """For the size of buffer that the user has in mind."""
    add: float
    """Microseconds for one step of all environments."""
    sample: float
    """Microseconds for a batch."""

    @property
    def subject(self) -> str:
        return self.memory.subject

    @property
    def time(self) -> float:
        """An ``add`` and a ``sample``."""
        return self.add + self.sample


@dataclass(frozen=True)
class Comparison:
    """What was measured; the first result is SB3's."""

    play: PlayFile
    buffer_size: int
    batch_size: int
    results: list[Result]

    @property
    def sb3(self) -> Result:
        return self.results[0]

    @property
    def is_extrapolated(self) -> bool:
        return self.buffer_size > self.play.transition_count


def compare(play: PlayFile, subjects: Sequence[str], buffer_size: int, batch_size: int, repeats: int) -> Comparison:
    """Measure memory, each subject in a fresh process, and time, all of them taking turns in this one."""
    held = min(buffer_size, play.transition_count)
    needed = sb3_bytes(held, play.observation_space, play.action_space)
    if needed > 0.8 * available_memory():
        raise CapacityError(
            f"SB3's buffer with the {held:,} transitions played takes {readable(needed)}, of which "
            f"{readable(available_memory())} are available. Play fewer --steps to compare with it."
        )
    everyone = [SB3, *subjects]
    with tqdm(everyone, "memory", unit="process") as bar:
        memories = [run_in_fresh_process(measure_memory, subject, play, buffer_size) for subject in bar]
    buffers = {
        subject: make_replay_buffer(subject, held, play.observation_space, play.action_space, play.n_envs)
        for subject in everyone
    }
    times = time_replay_buffers(buffers, play.transitions(), play.steps, [batch_size], repeats)
    results = [
        Result(
            memory,
            buffer_bytes=memory.for_buffer_of(buffer_size),
            add=times[memory.subject]["add"],
            sample=times[memory.subject][f"sample({batch_size})"],
        )
        for memory in memories
    ]
    return Comparison(play, buffer_size, batch_size, results)


def measure_memory(subject: str, play: PlayFile, buffer_size: int) -> Memory:
    """How a buffer for ``buffer_size`` transitions grows with a play. To be run in a fresh process."""
    if subject == SB3:  # whose arrays may be larger than memory, and grow the same whatever their size
        buffer_size = min(buffer_size, play.transition_count)
    arguments = (play.observation_space, play.action_space, play.n_envs)
    # Code is loaded, kernels compiled and the allocator's pools filled by a small buffer.
    buffer = make_replay_buffer(subject, _WARM_UP_STEPS * play.n_envs, *arguments)
    for transition in play.transitions(_WARM_UP_STEPS):
        buffer.add(*transition)
    del buffer

    before = settled_rss()
    buffer = make_replay_buffer(subject, buffer_size, *arguments)
    grown, accounted = [], []
    half = play.steps // 2
    for step, transition in enumerate(play.transitions(), 1):
        buffer.add(*transition)
        if step in (half, play.steps):
            grown.append(settled_rss() - before)
            accounted.append(_accounted(buffer))
    added = (play.steps - half) * play.n_envs
    # Pages are too coarse to see a small buffer grow: then what the buffer itself accounts for is larger.
    growth = max(found[-1] - found[0] for found in (grown, accounted)) / added
    method = buffer.memory_usage().method if isinstance(buffer, BaseCompressedBuffer) else "none"
    return Memory(subject, method, buffer.size() * play.n_envs, max(grown[-1], accounted[-1]), growth)


def _accounted(buffer: ReplayBuffer) -> int:
    if isinstance(buffer, BaseCompressedBuffer):
        return buffer.memory_usage().total
    return sb3_bytes(buffer.size() * buffer.n_envs, buffer.observation_space, buffer.action_space)
