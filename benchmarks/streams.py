"""What a measurement plays: which recording, for how many steps and environments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from benchmarks.playback import play_back
from benchmarks.recordings import Recording, Transition, load_recording
from benchmarks.subjects.base import Task


@dataclass(frozen=True)
class Stream:
    """A recording, played for any number of steps and environments."""

    data: str
    """The name of the recording."""
    steps: int
    """Steps of each environment. A buffer for the stream has room for all of them."""
    n_envs: int
    recorded_steps: int
    recorded_envs: int

    @property
    def transitions(self) -> int:
        return self.steps * self.n_envs

    @cached_property
    def recording(self) -> Recording:
        """The recording. If it is missing, it is made first."""
        return load_recording(self.data, self.recorded_steps, self.recorded_envs)

    def play(self, steps: int) -> Iterator[Transition]:
        return play_back(self.recording, steps, self.n_envs)

    def task(self, steps: int) -> Task:
        """Describe a buffer for ``steps`` steps of each environment."""
        return Task(
            capacity=steps * self.n_envs,
            n_envs=self.n_envs,
            stack=self.recording.stack,
            observation_space=self.recording.observation_space,
            action_space=self.recording.action_space,
        )
