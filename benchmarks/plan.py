"""What the suite measures: which recordings, with which subjects, how much and how often."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.environments import ENVIRONMENTS, WORKLOADS
from benchmarks.streams import Stream
from benchmarks.subjects import LIBRARIES, library_of

PEERS = ("older:zstd-5", "cpprb", "torchrl:tensor", "torchrl:memmap", "torchrl:compressed")
SMALLEST = "ours:auto prefer=memory"
SMALLEST_COLOUR = "ours:delta-zstd indexed"
"""For images with at most 256 colours."""
GAME = "mspacman"
"""The recording that all sections use except ``replay``."""


@dataclass(frozen=True)
class Data:
    """A recording, and the subjects that are measured on it."""

    title: str
    steps: int
    """Steps of each environment: enough that ``auto`` settles on a method while the buffer is filled."""
    subjects: tuple[str, ...]
    n_envs: int = 4

    def stream(self, name: str) -> Stream:
        return Stream(name, self.steps, self.n_envs, self.steps, self.n_envs)


@dataclass(frozen=True)
class Plan:
    data: dict[str, Data]
    """The recordings of the section ``replay``, by name."""
    game_steps: int
    """Steps of each of four environments of :data:`GAME`, for the other sections."""
    fill_rounds: int
    """Number of turns over which a buffer is filled."""
    sample_rounds: int
    saving_rounds: int
    saving_subjects: tuple[str, ...]
    rollout_rounds: int
    rollout_subjects: tuple[str, ...]
    sizes: tuple[int, ...]
    """Buffer sizes in transitions, in ascending order. The smallest is enough for ``auto`` to settle on a method."""
    env_counts: tuple[int, ...]
    scaling_subjects: tuple[str, ...]
    recorded_steps: int
    """Steps of the recording that fills buffers of all sizes. Larger buffers play it repeatedly."""
    seconds_per_size: float
    """A size is skipped if filling the buffer is expected to take longer."""
    training_subjects: tuple[str, ...]
    training_steps: dict[str, int]
    training_rounds: int


FULL = Plan(
    data={
        "mspacman": Data(
            "MsPacman, 84×84 grey, stacks of 4",
            5_000,
            (
                "sb3",
                "ours:auto",
                "ours:delta",
                "ours:zstd-dict/3",
                SMALLEST,
                "ours:zstd-5",
                "ours:igzip1",
                "ours:lz4-frame/1",
                "ours:none",
                "older:igzip0",
                "older:rle-jit",
                *PEERS,
            ),
        ),
        "pong": Data("Pong, 84×84 grey, stacks of 4", 5_000, ("sb3", "ours:auto", SMALLEST, *PEERS)),
        "breakout": Data("Breakout, 84×84 grey, stacks of 4", 5_000, ("sb3", "ours:auto", SMALLEST, *PEERS)),
        "mspacman_rgb": Data(
            "MsPacman, 210×160 RGB", 2_500, ("sb3", "ours:auto", "ours:delta", SMALLEST_COLOUR, "ours:zstd-5", *PEERS)
        ),
        "doom_labels": Data(
            "ViZDoom, masks of 120×160", 4_000, ("sb3", "ours:auto", "ours:delta", "ours:delta-zstd", *PEERS), n_envs=2
        ),
        "doom_rgb": Data(
            "ViZDoom, RGB of 120×160",
            4_000,
            ("sb3", "ours:auto", "ours:bitpack", "ours:pixel-lz", SMALLEST_COLOUR, "ours:zstd-5", *PEERS),
            n_envs=2,
        ),
        "acrobot": Data("Acrobot, vectors of 6 float32", 5_000, ("sb3", "ours:auto", "ours:delta", *PEERS)),
        "noise": Data("Noise, 4×84×84 random bytes", 3_000, ("sb3", "ours:auto", "ours:delta", "ours:zstd-5", *PEERS)),
    },
    game_steps=3_000,
    fill_rounds=24,
    sample_rounds=12,
    saving_rounds=3,
    saving_subjects=("sb3", "ours:auto", SMALLEST, *PEERS),
    rollout_rounds=12,
    rollout_subjects=("sb3", "ours:auto", "ours:delta", "ours:none", "older:zstd-5"),
    sizes=(10_000, 100_000, 1_000_000),
    env_counts=(1, 4, 16),
    scaling_subjects=("sb3", "ours:auto", SMALLEST, "older:zstd-5", "cpprb", "torchrl:compressed"),
    recorded_steps=25_000,
    seconds_per_size=240.0,
    training_subjects=("sb3", "ours:auto"),
    training_steps={"DQN": 1_600, "PPO": 3_072},
    training_rounds=3,
)

WORKLOAD_DATA = {
    name: Data(f"{name.capitalize()}: {ENVIRONMENTS[name].why}", 5_000, ("sb3", "ours:auto"))
    for names in WORKLOADS.values()
    for name in names
    if name not in FULL.data
}
"""Further recordings, measured only if they are named. :mod:`benchmarks.studies.workloads` measures all of them."""

_ONE_OF_EACH = ("sb3", "ours:auto", "older:zstd-5", "cpprb", "torchrl:tensor")
QUICK = replace(
    FULL,
    data={
        "mspacman": replace(FULL.data["mspacman"], steps=1_000, subjects=(*_ONE_OF_EACH, SMALLEST)),
        "acrobot": replace(FULL.data["acrobot"], steps=1_000, subjects=_ONE_OF_EACH),
    },
    game_steps=1_000,
    fill_rounds=8,
    sample_rounds=3,
    saving_rounds=1,
    saving_subjects=_ONE_OF_EACH,
    rollout_rounds=3,
    rollout_subjects=("sb3", "ours:auto", "older:zstd-5"),
    sizes=(1_000, 5_000),
    env_counts=(1, 8),
    scaling_subjects=("sb3", "ours:auto"),
    recorded_steps=1_000,
    seconds_per_size=10.0,
    training_steps={"DQN": 400},
    training_rounds=1,
)


def choose(plan: Plan, data: list[str] | None, subjects: list[str] | None, steps: int | None = None) -> Plan:
    """Return the plan with other data, subjects or steps.

    In ``subjects``, a library selects those of its subjects that are in the plan. ``library:method`` is measured on all
    data, even if the plan does not have it.
    """
    if data is not None:
        known = FULL.data | WORKLOAD_DATA
        unknown = [name for name in data if name not in known]
        if unknown:
            raise ValueError(f"unknown data {', '.join(unknown)}; known are {', '.join(known)}")
        plan = replace(plan, data={name: plan.data.get(name, known[name]) for name in data})
    if steps is not None:
        if steps < plan.fill_rounds:
            raise ValueError(f"--steps must be at least {plan.fill_rounds}, not {steps}")
        plan = replace(plan, data={name: replace(part, steps=steps) for name, part in plan.data.items()})
    if subjects is None:
        return plan
    for subject in subjects:
        library_of(subject)

    def chosen(planned: tuple[str, ...]) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for subject in subjects:
            whole_library = subject in LIBRARIES
            found |= dict.fromkeys(
                [name for name in planned if name.partition(":")[0] == subject] if whole_library else [subject]
            )
        return tuple(found)

    rollouts = tuple(subject for subject in chosen(plan.rollout_subjects) if library_of(subject).has_rollouts)
    return replace(
        plan,
        data={name: replace(part, subjects=chosen(part.subjects)) for name, part in plan.data.items()},
        rollout_subjects=rollouts,
        saving_subjects=chosen(plan.saving_subjects),
        scaling_subjects=chosen(plan.scaling_subjects),
        training_subjects=tuple(
            name for name in plan.training_subjects if name in subjects or name.partition(":")[0] in subjects
        ),
    )


def subjects_of(plan: Plan, section: str) -> tuple[str, ...]:
    """The subjects of a section."""
    return {
        "replay": tuple(dict.fromkeys(subject for data in plan.data.values() for subject in data.subjects)),
        "saving": plan.saving_subjects,
        "rollouts": plan.rollout_subjects,
        "sizes": plan.scaling_subjects,
        "environments": plan.scaling_subjects,
        "training": plan.training_subjects,
    }[section]
