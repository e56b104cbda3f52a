"""The short histories, which ``make test`` runs: at least one for every class and method."""

from __future__ import annotations

from tests.histories import visits
from tests.histories.plans import AUTO, LEARNING, Name, methods_of, worlds_of
from tests.persistence.buffers import ALL_CLASSES

BUFFERS = ALL_CLASSES
STEPS, LEARNING_STEPS = 200, 700
PICTURES = {
    "stack",
    "stack, channels last",
    "stack of RGB",
    "RGB",
    "RGB of tiles",
    "uint16",
    "float images",
    "Dict",
    "goals",
}
"""Worlds with images, in which codecs can find patterns."""
VECTORS = ("float64", "int32")
"""Worlds whose observations are stored as plain rows."""
KERNEL_STEPS = 24
"""Few, because Triton's interpreter is slow."""


def short_histories(buffer: str) -> list[Name]:
    """One history for each method, and longer ones in several worlds for methods that learn from the data."""
    worlds, names = worlds_of(buffer), []
    pictures = [world for world in worlds if world in PICTURES] or worlds
    shift = BUFFERS.index(buffer)  # so that classes combine methods and worlds differently
    for i, method in enumerate(methods_of(buffer)):
        if method in LEARNING:
            for number in range(2 if "Dict" in buffer or "Her" in buffer else 4):
                world = pictures[(i + number + shift) % len(pictures)]
                names.append(Name(buffer, method, world, LEARNING_STEPS, number))
        names.append(Name(buffer, method, worlds[(i + shift) % len(worlds)], STEPS, 0))
    if buffer in ("CompressedReplayBuffer", "CompressedRolloutBuffer"):
        names += [Name(buffer, "pixel-lz", "RGB of tiles", STEPS, number) for number in range(1, 4)]
    if buffer in ("CompressedReplayBuffer", "CompressedNStepReplayBuffer", "CompressedRolloutBuffer"):
        names += [Name(buffer, AUTO, world, LEARNING_STEPS, number) for world in VECTORS for number in range(1, 7)]
    return names


def segment_histories(buffer: str) -> list[Name]:
    """Histories whose steps arrive in segments.

    Each class tests a third of the methods, different from the previous class; ``CompressedReplayBuffer`` tests all.
    """
    worlds, methods = worlds_of(buffer), methods_of(buffer)
    pictures = [world for world in worlds if world in PICTURES] or worlds
    shift = BUFFERS.index(buffer)
    names = [
        Name(buffer, method, pictures[(i + shift) % len(pictures)], STEPS + (method in LEARNING) * 200, 10)
        for i, method in enumerate(methods)
        if (i + shift) % 3 == 0 or buffer == "CompressedReplayBuffer"
    ]
    vectors = [world for world in worlds if world in VECTORS] or worlds[:1]
    return [*names, *(Name(buffer, AUTO, world, STEPS, 11) for world in vectors)]


def visits_of(buffer: str) -> set[str]:
    """The rare events that the histories of a class must cause; see ``FEWEST_VISITS`` in ``test_histories``."""
    kinds = {
        visits.REFERENCES, visits.INDEX_GROWTH, visits.INDEX_WRAP, visits.ARENA_GROWTH, visits.REBUILDS,
        visits.RENUMBERINGS,
    }  # fmt: skip
    if AUTO in methods_of(buffer) and not buffer.startswith("Gpu"):
        kinds |= {visits.DICTIONARIES, visits.CODEC_CHANGES}
    if buffer.startswith("Gpu"):
        kinds -= {visits.REBUILDS}  # rare, because codecs do not change
    if "Rollout" in buffer:
        kinds |= {visits.PHANTOMS} if not buffer.startswith("Gpu") else set()
    else:
        kinds |= {visits.ARENA_WRAP, visits.ARENA_MOVES}
    return kinds


def kernel_histories() -> list[Name]:
    """Histories for the Triton kernels, which the interpreter can run on any machine."""
    return [
        Name(buffer, method, "tiny stack", KERNEL_STEPS, number)
        for buffer, method, count in (
            ("GpuReplayBuffer", "delta", 3),
            ("GpuReplayBuffer", "rle", 1),
            ("GpuRolloutBuffer", "delta", 1),
            ("GpuRolloutBuffer", "rle", 1),
            ("GpuSequenceReplayBuffer", "delta", 3),
            ("GpuPrioritizedSequenceReplayBuffer", "rle", 1),
        )
        for number in range(count)
    ]
