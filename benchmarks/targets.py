"""The speed and memory that the library promises for each group of workloads, next to SB3's buffer in the same run."""

from __future__ import annotations

from dataclasses import dataclass

PAUSE = 5_000.0
"""The longest that any ``add`` may take, in microseconds."""


@dataclass(frozen=True)
class Targets:
    """Speeds are SB3's time divided by ours. Bytes are per transition, or a share of SB3's if below 1."""

    add: float
    sample_32: float
    sample_256: float
    most_bytes: float | None = None
    """For every workload of the group."""
    usual_bytes: float | None = None
    """For :attr:`usual_count` of them."""
    usual_count: int = 0
    special_bytes: tuple[str, float] | None = None
    """For one workload: its name and its limit."""

    def limit_of(self, name: str) -> float | None:
        """The bytes that the workload ``name`` may take."""
        if self.special_bytes is not None and self.special_bytes[0] == name:
            return self.special_bytes[1]
        return self.most_bytes or self.usual_bytes


TARGETS = {
    "atari": Targets(0.9, 1.5, 2.0, 1_700, 750, 10, ("mspacman", 250)),
    "rgb": Targets(0.25, 1.0, 1.2, 1 / 4, 1 / 8, 4),
    "vectors": Targets(0.5, 0.95, 1.0, 0.65),
}
ATARI_MEMORY = Targets(0.3, 0.7, 1.0, None, 400, 10, ("mspacman", 140))
"""For Atari with ``prefer="memory"``."""


def targets_of(group: str, method: str) -> Targets:
    return ATARI_MEMORY if group == "atari" and method.endswith("prefer=memory") else TARGETS[group]


def is_within(bytes_per_transition: float, sb3_bytes: float, limit: float) -> bool:
    return bytes_per_transition <= (limit * sb3_bytes if limit < 1 else limit)
