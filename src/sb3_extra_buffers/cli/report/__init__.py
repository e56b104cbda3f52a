"""What ``bench`` found, as text, JSON, a picture and a page."""

from __future__ import annotations

from dataclasses import dataclass

from sb3_extra_buffers.measure.comparison import Comparison, Result
from sb3_extra_buffers.measure.environments import describe
from sb3_extra_buffers.measure.recommendation import Recommendation
from sb3_extra_buffers.storage.usage import readable


@dataclass(frozen=True)
class Report:
    """The findings with the words for them that all forms share."""

    env_id: str
    player: str
    """What chose the actions."""
    comparison: Comparison
    recommendation: Recommendation

    @property
    def headings(self) -> tuple[str, ...]:
        size, batch = self.comparison.buffer_size, self.comparison.batch_size
        return ("method", f"memory for {size:,}", "smaller", "add, µs", f"sample({batch}), µs", "speed")

    def cells(self, result: Result) -> tuple[str, ...]:
        sb3 = self.comparison.sb3
        return (
            self.label(result),
            readable(result.buffer_bytes),
            f"{sb3.buffer_bytes / result.buffer_bytes:,.1f}×",
            f"{result.add:,.0f}",
            f"{result.sample:,.0f}",
            f"{sb3.time / result.time:.2f}×",
        )

    def label(self, result: Result) -> str:
        """The subject and, where that is not the same, what it turned out to be."""
        if result.subject == "auto":
            return f"auto ({result.memory.method.replace(' (auto)', '')})"
        return result.subject

    @property
    def summary(self) -> str:
        play = self.comparison.play
        return (
            f"{self.env_id}, {play.steps:,} steps of {play.n_envs} copies played by {self.player}; "
            f"observations: {describe(play.observation_space)}"
        )

    @property
    def how(self) -> str:
        """How the figures came about."""
        played = self.comparison.play.transition_count
        held = min(played, self.comparison.buffer_size)
        memory = f"Memory is what a fresh process grew by with {held:,} transitions"
        if self.comparison.is_extrapolated:
            memory += f", extrapolated to {self.comparison.buffer_size:,}"
        n_envs = self.comparison.play.n_envs
        copies = "one step" if n_envs == 1 else f"one step of {n_envs} copies"
        return (
            f"{memory}. Times were measured with the buffers taking turns: add is the mean for {copies}, sample the "
            "median for a batch; speed is SB3's time for one of each, divided by this one's."
        )

    @property
    def advice(self) -> str:
        return f"{self.label(self.recommendation.result)}, because {self.recommendation.reason}."
