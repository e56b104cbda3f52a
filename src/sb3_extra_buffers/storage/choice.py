"""How ``auto`` chooses a codec: in a *trial*, several codecs store the same steps as the buffer, and are measured.

Codecs that read observations more slowly than SB3's buffer are out, unless the user prefers memory. Among the others,
the lowest cost wins, which weighs bytes against time. If no codec is worth it, observations stay uncompressed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.codecs.registry import available_methods, parse_method
from sb3_extra_buffers.parallel import expected_speedup
from sb3_extra_buffers.storage.config import CodecRecipe, Preference
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.reading_time import (
    ColdMemory,
    ReadingTime,
    Sb3Reader,
    StoreReader,
    cpu_time,
    reading_steps,
)
from sb3_extra_buffers.storage.stacking import RGB, StackLayout

TIME_WEIGHTS: dict[Preference, float] = {"speed": 4.0, "balanced": 0.85, "memory": 0.05}
"""The cost of a codec is its bytes per frame times its time raised to this exponent. When balanced, half the memory is
worth a little more than twice the time."""
TIME_WEIGHT = TIME_WEIGHTS["balanced"]
SLOWEST_READ: dict[Preference, float] = {"speed": 0.87, "balanced": 0.87, "memory": 2.0}
"""How long reading an observation may take, as a multiple of SB3's time. Unless the user prefers memory, it is below 1,
because a codec reads a little faster in a trial than in a full buffer."""
_READ_TOLERANCE = 1.05
"""Reading may take this many times as long as ``SLOWEST_READ`` allows if the codec is in use already, or if no codec is
fast enough: a codec that is about as fast as SB3 is better than none."""
_EQUAL_COST_RATIO: dict[Preference, float] = {"speed": 1.15, "balanced": 1.15, "memory": 1.0}
"""Costs are measured, so all costs up to this multiple of the lowest one count as equal. Of these codecs, the one
that reads fastest is chosen."""
_USUAL_BATCH = 32
"""The batch size for which to estimate how much faster several threads decode than one."""
_FIXED_BYTES = 64
"""Roughly how many bytes a transition takes beside its frame, with every codec."""
_NEGLIGIBLE_SHARE: dict[Preference, float] = {"speed": 1 / 64, "balanced": 1 / 64, "memory": 0.0}
"""Added to the size of every frame, as a share of a raw frame. So below this size, savings hardly lower the cost."""
_LEAST_SAVING = 0.1
"""A codec that makes frames less than this share smaller is not worth it."""
_READS_PER_WRITE = 8
"""How often an observation is read for each time that it is stored: by DQN with its usual batches, and by PPO."""
_MOST_LANES = 4
"""Trials store the steps of at most this many environments."""
SMALLEST_FRAME = 512
"""In bytes. Smaller frames are not compressed: looking up their records would cost too much."""
_MEASURED_BYTES, _FEWEST_STEPS, _MOST_STEPS = 14 << 20, 128, 4096
"""The bytes of raw frames that a long trial measures, and the fewest and the most steps that it stores. With fewer
frames, the processor learns to predict the branches of the decoder. Then reading seems to be up to three times as fast
as in a full buffer."""
_FEWEST_STEPS_OF_HUGE_FRAMES = 32
"""Trials of frames that are so large that fewer than ``_FEWEST_STEPS`` steps measure enough bytes store at least
these."""
_REPLACE_RATIO: dict[Preference, float] = {"speed": 0.75, "balanced": 0.75, "memory": 0.95}
"""The codec in use is only replaced by one whose cost is at most this share of its own."""


class PlannedTrials(NamedTuple):
    """A trial that ``auto`` plans from the start."""

    begin: int
    """The step at which the trial begins."""
    n_steps: int | None
    """How many steps it stores; ``None`` for as many as it takes to measure reading well."""
    good_enough: float
    """The trial is left out if the first codec compresses frames to at most this share of their size."""


TRIALS = [
    PlannedTrials(begin=64, n_steps=64, good_enough=1 / 4),
    # The first steps of an episode often look alike, so the choice is checked again later.
    PlannedTrials(begin=384, n_steps=128, good_enough=1 / 20),
    PlannedTrials(begin=1536, n_steps=None, good_enough=1 / 20),
]

NONE = CodecRecipe(parse_method("none"))
DELTA = CodecRecipe(parse_method("delta"))
_SHORT_RECORDS = CodecRecipe(parse_method("delta"), {"frames_per_record": 4})
"""Less compression, but faster to read. For observations that are not stacked: a stack would need several records."""
BITPACK = CodecRecipe(parse_method("bitpack"))
"""For images full of noise, such as those of cameras."""
_PIXEL_LZ = CodecRecipe(parse_method("pixel-lz"))
"""For colour images with tiles or sprites, or flat areas."""
_CANDIDATES = [BITPACK, _PIXEL_LZ, CodecRecipe(parse_method("zstd-dict/3"))]
_WITHOUT_NUMBA = [CodecRecipe(parse_method(method)) for method in ("zstd/3", "lz4-frame/0", "igzip/1", "gzip/1")]
DELTA_ZSTD = CodecRecipe(parse_method("delta-zstd"))
_FOR_MEMORY = [DELTA_ZSTD, CodecRecipe(parse_method("delta-zstd"), {"frames_per_record": 4})]
_LONG_RECORDS = CodecRecipe(DELTA_ZSTD.method, {"frames_per_record": 16})
_LONG_RECORDS_RATIO = 1 / 28
"""If frames are compressed to at most this share of a raw one, long records save memory and are read in about the same
time, because an observation is in fewer of them. With larger frames, libzstd has to decompress so many bytes per record
that sampling becomes clearly slower."""
_FOR_MEMORY_OF_RGB = [CodecRecipe(parse_method("delta-zstd"), {"indexed_colour": True})]


def is_worth_compressing(layout: StackLayout) -> bool:
    return layout.frame.nbytes >= SMALLEST_FRAME


def first_recipe(layout: StackLayout, prefer: Preference) -> CodecRecipe:
    """The codec that ``auto`` begins with."""
    if not has_numba() or not is_worth_compressing(layout):
        return NONE
    return _LONG_RECORDS if prefer == "memory" and "delta-zstd" in available_methods() else DELTA


def with_best_length(recipe: CodecRecipe, ratio: float) -> CodecRecipe:
    """Choose the frames per record of ``delta-zstd`` for frames compressed to ``ratio``. Return other recipes as is."""
    if recipe not in (DELTA_ZSTD, _LONG_RECORDS):
        return recipe
    return _LONG_RECORDS if ratio <= _LONG_RECORDS_RATIO else DELTA_ZSTD


@dataclass(frozen=True)
class Trial:
    """What was measured for a codec: bytes per frame, and microseconds to store and to read an observation."""

    recipe: CodecRecipe
    raw_bytes: int
    frame_bytes: float
    storing: float
    reading: float
    has_references: bool = False
    """Whether reading an observation also reads a reference frame."""

    def cost(self, prefer: Preference) -> float:
        memory = self.frame_bytes + _FIXED_BYTES + _NEGLIGIBLE_SHARE[prefer] * self.raw_bytes
        return float(memory * (self.storing + _READS_PER_WRITE * self.reading) ** TIME_WEIGHTS[prefer])

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.recipe.options.items())
        return f"{self.recipe.method}{options}: {self.frame_bytes:,.0f} bytes a frame, read in {self.reading:.1f} µs"


def trial_steps(layout: StackLayout, n_envs: int, n_steps: int | None = None, most_steps: float = math.inf) -> int:
    """How many steps :class:`Trials` store, which have the same parameters."""
    step_bytes = max(layout.frame.nbytes, 1) * _n_lanes(layout, n_envs)
    enough = max(min(2 * _MEASURED_BYTES // step_bytes, _MOST_STEPS), _FEWEST_STEPS_OF_HUGE_FRAMES)
    return min(n_steps or max(int(min(enough, most_steps)), _FEWEST_STEPS), enough)


def measuring_steps(layout: StackLayout, prefer: Preference) -> int:
    """Over how many further steps :class:`Trials` spread their measurements."""
    return reading_steps(1 + len(_recipes_to_try(layout, prefer)))


def _n_lanes(layout: StackLayout, n_envs: int) -> int:
    """Of how many environments trials store frames."""
    return min(n_envs, _MOST_LANES, max(_MEASURED_BYTES // (_FEWEST_STEPS * max(layout.frame.nbytes, 1)), 1))


def _recipes_to_try(layout: StackLayout, prefer: Preference) -> list[CodecRecipe]:
    recipes = [NONE]
    if is_worth_compressing(layout):
        if not has_numba():
            recipes += _WITHOUT_NUMBA
        elif prefer == "memory":
            is_rgb = layout.frame.channels == RGB and layout.dtype == np.uint8
            recipes += [DELTA, *_FOR_MEMORY, *(_FOR_MEMORY_OF_RGB if is_rgb else [])]
        else:
            recipes += [DELTA if layout.stack > 1 else _SHORT_RECORDS, *_CANDIDATES]
    installed = available_methods()
    return [recipe for recipe in recipes if recipe.method.name in installed]


class Trials:
    """Stores with several codecs, which get the same steps as the buffer for a while.

    :param n_steps: How many steps to store; by default, as many as it takes to measure reading well.
    :param most_steps: The limit of this default. At least ``_FEWEST_STEPS`` steps are stored nevertheless.
    :param current: The codec in use, which is only replaced by one that is clearly better.
    """

    def __init__(
        self,
        layout: StackLayout,
        n_envs: int,
        n_steps: int | None = None,
        most_steps: float = math.inf,
        prefer: Preference = "balanced",
        current: CodecRecipe | None = None,
    ) -> None:
        n_lanes = _n_lanes(layout, n_envs)
        self._candidates = [_Candidate(recipe, layout, n_lanes) for recipe in _recipes_to_try(layout, prefer)]
        self._prefer, self._current, self._stack, self._n_lanes = prefer, current, layout.stack, n_lanes
        # SB3 does most of its work in one thread, and so does this library without a compiled kernel.
        is_compiled = has_numba()
        self._speedup = expected_speedup(2 * _USUAL_BATCH * layout.stack * layout.frame.nbytes) if is_compiled else 1.0
        self._n_steps, self._step = trial_steps(layout, n_envs, n_steps, most_steps), 0
        self._cold: ColdMemory | None = ColdMemory(layout.stack * layout.frame.nbytes)
        self._sb3 = ReadingTime(Sb3Reader())
        self._unread = deque([self._measure_sb3, *(candidate.measure_reading for candidate in self._candidates)])

    def add(self, observations: npt.NDArray[Any]) -> None:
        """Store a step with each codec. Once all steps are stored, measure one of the codecs for a moment.

        No call may take long, so memory is allocated and released little by little, too.
        """
        if self._cold is None:
            return
        if self._step < self._n_steps:
            if self._step == self._n_steps // 2:  # codecs learn from the first half; the second half is measured
                for candidate in self._candidates:
                    candidate.begin_to_measure()
            stored = np.ascontiguousarray(observations[: self._n_lanes])
            for candidate in self._candidates:
                candidate.store(stored)
            self._step += 1
            self._cold.grow(self._step / self._n_steps)
        elif self._unread:
            if self._unread[0](self._cold):
                self._unread.popleft()
            else:  # in turn, so that a busy machine affects all of them alike
                self._unread.rotate(-1)
        elif self._cold.shrink():
            self._cold = None

    def _measure_sb3(self, cold: ColdMemory) -> bool:
        self._sb3.measure(cold)
        return self._sb3.is_complete

    @property
    def is_complete(self) -> bool:
        return self._cold is None

    @property
    def steps_left(self) -> int:
        """The most steps until the trials are complete."""
        return self._n_steps - self._step + reading_steps(1 + len(self._candidates))

    def _results(self) -> list[Trial]:
        none, *others = (candidate.result() for candidate in self._candidates)
        # In a full buffer, reference frames are in no cache. Fetching one takes about as long as reading a raw frame.
        extra = {True: none.reading / self._stack, False: 0.0}
        return [none, *(replace(trial, reading=trial.reading + extra[trial.has_references]) for trial in others)]

    def best(self) -> Trial:
        trials = self._results()
        none = trials[0]
        slowest = self._slowest()
        smaller = [trial for trial in trials[1:] if trial.frame_bytes <= (1 - _LEAST_SAVING) * trial.raw_bytes]
        fast = [trial for trial in smaller if trial.reading <= _READ_TOLERANCE * slowest]
        if any(trial.reading <= slowest for trial in fast):
            fast = [trial for trial in fast if trial.reading <= slowest or trial.recipe == self._current]
        if not fast:
            return none
        highest = _EQUAL_COST_RATIO[self._prefer] * min(trial.cost(self._prefer) for trial in fast)
        about_as_good = [trial for trial in fast if trial.cost(self._prefer) <= highest]
        best = min(about_as_good, key=lambda trial: (trial.reading, trial.cost(self._prefer)))
        stay = [trial for trial in fast if trial.recipe == self._current]
        return (
            stay[0]
            if stay and best.cost(self._prefer) > _REPLACE_RATIO[self._prefer] * stay[0].cost(self._prefer)
            else best
        )

    def _slowest(self) -> float:
        """The microseconds that one thread may take to read an observation, given how long SB3's buffer takes."""
        return SLOWEST_READ[self._prefer] * self._speedup * self._sb3.microseconds

    def __str__(self) -> str:
        """What was measured, as text for users."""
        limit = f"SB3's buffer takes {self._sb3.microseconds:.1f} µs, so up to {self._slowest():.1f} µs are accepted"
        return f"{'; '.join(map(str, self._results()))}; {limit}"


class _Candidate:
    """One codec, its store, and what was measured so far."""

    def __init__(self, recipe: CodecRecipe, layout: StackLayout, n_lanes: int) -> None:
        self._recipe = recipe
        self._layout = layout
        self._lanes = np.arange(n_lanes)
        self._store = FrameStore(recipe.build(layout.frame), n_lanes, layout)
        self._reading: ReadingTime | None = None
        self._trial: Trial | None = None
        self.begin_to_measure()

    def begin_to_measure(self) -> None:
        store = self._store
        self._seconds, self._n_observations, self._firsts = 0.0, 0, store.heads.copy()
        # Keep the frames that wait in the ring now, too. If a lane gets fewer frames from now on, measure_reading()
        # begins before its place in self._firsts, and must find no released frame there.
        self._oldest = np.maximum(store.heads - store.ring.shape[1] - self._layout.stack - 1, 0)
        store.restart_mean()

    def store(self, observations: npt.NDArray[Any]) -> None:
        began = cpu_time()
        self._store.append(self._lanes, observations, lambda: self._oldest)
        self._seconds += cpu_time() - began
        self._n_observations += len(observations)

    def measure_reading(self, cold: ColdMemory) -> bool:
        """Measure for a moment how long reading takes. Returns whether that completes the measurement."""
        if self._trial is not None:  # Ctrl-C came after the last measurement
            return True
        store = self._store
        if self._reading is None:
            # Only encoded frames are read, except with "none": its records are as raw as the frames in the ring.
            stops = (store.heads if self._recipe == NONE else store.encoded) - self._layout.stack
            firsts = np.maximum(np.minimum(self._firsts, stops - 1), 0)
            self._reading = ReadingTime(StoreReader(store, self._lanes, firsts, stops))
        self._reading.measure(cold)
        if self._reading.is_complete:
            self._trial = self._result(self._reading.microseconds)
            del self._store, self._reading
        return self._trial is not None

    def result(self) -> Trial:
        assert self._trial is not None
        return self._trial

    def _result(self, reading: float) -> Trial:
        raw_bytes = self._layout.frame.nbytes
        return Trial(
            self._recipe,
            raw_bytes,
            self._store.mean_frame_bytes() or raw_bytes,
            1e6 * self._seconds / max(self._n_observations, 1) + 1e-3,
            reading,
            len(self._store.codec.reference_frames) > 1,
        )
