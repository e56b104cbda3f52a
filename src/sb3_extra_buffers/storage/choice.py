"""``auto``: for some steps, several codecs store the same observations as the buffer. Then the best is chosen.

The rule: a codec that reads observations more slowly than SB3's buffer is not chosen, unless the user prefers memory.
Among the others, the cost decides, which weighs bytes against time. Where no codec is worth it, none is used.
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
from sb3_extra_buffers.storage.reading_time import ColdMemory, ReadingTime, Sb3Reader, StoreReader, cpu_time
from sb3_extra_buffers.storage.stacking import RGB, StackLayout

TIME_WEIGHTS: dict[Preference, float] = {"speed": 4.0, "balanced": 0.85, "memory": 0.05}
"""Cost is bytes times time to this power. When balanced, half the memory is worth a little more than twice the time."""
TIME_WEIGHT = TIME_WEIGHTS["balanced"]
SLOWEST_READ: dict[Preference, float] = {"speed": 0.87, "balanced": 0.87, "memory": 2.0}
"""How long reading an observation may take, compared with SB3's buffer. Less than 1, because even many frames are read
a little faster in a trial than in a full buffer..."""
_IMPRECISION = 1.05
"""... and how much longer if the codec is in use, or if nothing is that fast. Then a codec that is about as fast as SB3
is better than none."""
_ABOUT_AS_GOOD: dict[Preference, float] = {"speed": 1.15, "balanced": 1.15, "memory": 1.0}
"""Costs are measured, so those up to so many times the lowest one count as the same. Of these codecs, the one that is
read fastest is chosen."""
_USUAL_BATCH = 32
_FIXED_BYTES = 64
"""About the size of a transition without its frame, whatever the codec."""
_SMALL_ENOUGH: dict[Preference, float] = {"speed": 1 / 64, "balanced": 1 / 64, "memory": 0.0}
"""Compressed to this part of a raw frame, further savings matter less and less."""
_LEAST_SAVING = 0.1
_READS = 8
"""How often an observation is read for each time that it is stored: by DQN with its usual batches, and by PPO."""
_MOST_LANES = 4
SMALLEST_FRAME = 512
"""Smaller frames are not compressed: finding their records would cost too much."""
_MEASURED_BYTES, _FEWEST_STEPS, _MOST_STEPS = 14 << 20, 128, 4096
"""Uncompressed frames that make a trial long enough. Of fewer frames, a processor learns the branches that decoding
takes, and seems to read them up to three times as fast as those of a full buffer."""
_STAY: dict[Preference, float] = {"speed": 0.75, "balanced": 0.75, "memory": 0.95}
"""The codec in use is only replaced by one that costs this part or less."""


class PlannedTrials(NamedTuple):
    """When ``auto`` tries several codecs, for how many steps, and when it does not: if the first is good enough."""

    begin: int
    n_steps: int | None
    """``None``: as many as it takes to measure reading well."""
    good_enough: float


TRIALS = [
    PlannedTrials(begin=64, n_steps=64, good_enough=1 / 4),
    # The first steps of an episode are often all alike, so the choice is checked once more.
    PlannedTrials(begin=384, n_steps=128, good_enough=1 / 20),
    PlannedTrials(begin=1536, n_steps=None, good_enough=1 / 20),
]

NONE = CodecRecipe(parse_method("none"))
DELTA = CodecRecipe(parse_method("delta"))
_SHORT_CHAINS = CodecRecipe(parse_method("delta"), {"frames_per_record": 4})
"""Larger and faster to read. For frames that change a lot and are not stacked: a stack would need several of them."""
BITPACK = CodecRecipe(parse_method("bitpack"))
"""For images full of noise, such as those of cameras."""
_PIXEL_LZ = CodecRecipe(parse_method("pixel-lz"))
"""For colour images with tiles or sprites, or flat areas."""
_CANDIDATES = [BITPACK, _PIXEL_LZ, CodecRecipe(parse_method("zstd-dict/3"))]
_WITHOUT_NUMBA = [CodecRecipe(parse_method(method)) for method in ("zstd/3", "lz4-frame/0", "igzip/1", "gzip/1")]
DELTA_ZSTD = CodecRecipe(parse_method("delta-zstd"))
_FOR_MEMORY = [DELTA_ZSTD, CodecRecipe(parse_method("delta-zstd"), {"frames_per_record": 4})]
_LONG_RECORDS = CodecRecipe(DELTA_ZSTD.method, {"frames_per_record": 16})
_SHORT_FRAME = 1 / 28
"""Up to this part of a raw frame, long records are smaller and read in about the same time: an observation is in fewer
of them. If frames are larger, so much has to be decompressed that sampling becomes clearly slower."""
_FOR_MEMORY_OF_RGB = [CodecRecipe(parse_method("delta-zstd"), {"indexed_colour": True})]


def is_worth_compressing(layout: StackLayout) -> bool:
    return layout.frame.nbytes >= SMALLEST_FRAME


def first_recipe(layout: StackLayout, prefer: Preference) -> CodecRecipe:
    """The codec that ``auto`` begins with."""
    if not has_numba() or not is_worth_compressing(layout):
        return NONE
    return _LONG_RECORDS if prefer == "memory" and "delta-zstd" in available_methods() else DELTA


def with_best_length(recipe: CodecRecipe, ratio: float) -> CodecRecipe:
    """``delta-zstd`` with the frames per record that suit frames compressed to ``ratio``; other recipes unchanged."""
    if recipe not in (DELTA_ZSTD, _LONG_RECORDS):
        return recipe
    return _LONG_RECORDS if ratio <= _SHORT_FRAME else DELTA_ZSTD


@dataclass(frozen=True)
class Trial:
    """What a codec achieved: bytes per frame, and microseconds to store and to read an observation."""

    recipe: CodecRecipe
    raw_bytes: int
    frame_bytes: float
    storing: float
    reading: float
    has_references: bool = False
    """Whether a frame of its own is needed to read an observation."""

    def cost(self, prefer: Preference) -> float:
        memory = self.frame_bytes + _FIXED_BYTES + _SMALL_ENOUGH[prefer] * self.raw_bytes
        return float(memory * (self.storing + _READS * self.reading) ** TIME_WEIGHTS[prefer])

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.recipe.options.items())
        return f"{self.recipe.method}{options}: {self.frame_bytes:,.0f} bytes a frame, read in {self.reading:.1f} µs"


class Trials:
    """Stores of several codecs, which get the same steps as the buffer for a while.

    :param n_steps: For so many steps; by default, for as many as it takes to measure reading well.
    :param most_steps: For no more steps than these by default.
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
        installed, recipes = available_methods(), [NONE]
        if is_worth_compressing(layout):
            if not has_numba():
                recipes += _WITHOUT_NUMBA
            elif prefer == "memory":
                is_rgb = layout.frame.channels == RGB and layout.dtype == np.uint8
                recipes += [DELTA, *_FOR_MEMORY, *(_FOR_MEMORY_OF_RGB if is_rgb else [])]
            else:
                recipes += [DELTA if layout.stack > 1 else _SHORT_CHAINS, *_CANDIDATES]
        frame_bytes = max(layout.frame.nbytes, 1)
        n_lanes = min(n_envs, _MOST_LANES, max(_MEASURED_BYTES // (_FEWEST_STEPS * frame_bytes), 1))
        self._candidates = [
            _Candidate(recipe, layout, n_lanes) for recipe in recipes if recipe.method.name in installed
        ]
        self._prefer, self._current, self._stack, self._n_lanes = prefer, current, layout.stack, n_lanes
        # SB3 does most of its work by one thread, and so do we without a compiled kernel.
        is_compiled = has_numba()
        self._speedup = expected_speedup(2 * _USUAL_BATCH * layout.stack * layout.frame.nbytes) if is_compiled else 1.0
        measured_steps = _MEASURED_BYTES // (frame_bytes * n_lanes)
        enough = max(min(2 * measured_steps, most_steps, _MOST_STEPS), _FEWEST_STEPS)
        self._n_steps, self._step = n_steps or int(enough), 0
        self._cold: ColdMemory | None = ColdMemory(layout.stack * layout.frame.nbytes)
        self._sb3 = ReadingTime(Sb3Reader())
        self._unread = deque([self._measure_sb3, *(candidate.measure_reading for candidate in self._candidates)])

    def add(self, observations: npt.NDArray[Any]) -> None:
        """Store a step of all environments with each codec. Afterwards, measure for a moment how fast one of them is.

        No call takes long, so memory is taken and given back little by little as well.
        """
        if self._cold is None:
            return
        if self._step < self._n_steps:
            if self._step == self._n_steps // 2:  # a codec learns from the first half, and the second half is measured
                for candidate in self._candidates:
                    candidate.begin_to_measure()
            for candidate in self._candidates:
                candidate.store(np.ascontiguousarray(observations[: self._n_lanes]))
            self._step += 1
            self._cold.grow(self._step / self._n_steps)
        elif self._unread:
            if self._unread[0](self._cold):
                self._unread.popleft()
            else:  # in turn, so that the machine is as busy for one as for another
                self._unread.rotate(-1)
        elif self._cold.shrink():
            self._cold = None

    def _measure_sb3(self, cold: ColdMemory) -> bool:
        self._sb3.measure(cold)
        return self._sb3.is_complete

    @property
    def is_complete(self) -> bool:
        return self._cold is None

    def _results(self) -> list[Trial]:
        none, *others = (candidate.result() for candidate in self._candidates)
        # In a full buffer, a reference frame is in no cache, and reading it takes about as long again as copying it.
        extra = {True: none.reading / self._stack, False: 0.0}
        return [none, *(replace(trial, reading=trial.reading + extra[trial.has_references]) for trial in others)]

    def best(self) -> Trial:
        trials = self._results()
        none = trials[0]
        slowest = self._limit() * SLOWEST_READ[self._prefer]
        smaller = [trial for trial in trials[1:] if trial.frame_bytes <= (1 - _LEAST_SAVING) * trial.raw_bytes]
        fast = [trial for trial in smaller if trial.reading <= _IMPRECISION * slowest]
        if any(trial.reading <= slowest for trial in fast):
            fast = [trial for trial in fast if trial.reading <= slowest or trial.recipe == self._current]
        if not fast:
            return none
        highest = _ABOUT_AS_GOOD[self._prefer] * min(trial.cost(self._prefer) for trial in fast)
        about_as_good = [trial for trial in fast if trial.cost(self._prefer) <= highest]
        best = min(about_as_good, key=lambda trial: (trial.reading, trial.cost(self._prefer)))
        stay = [trial for trial in fast if trial.recipe == self._current]
        return stay[0] if stay and best.cost(self._prefer) > _STAY[self._prefer] * stay[0].cost(self._prefer) else best

    def _limit(self) -> float:
        """How long one thread may take to read an observation, so that sampling takes as long as from SB3's buffer."""
        return self._speedup * self._sb3.microseconds

    def __str__(self) -> str:
        """What was measured, for people."""
        limit = f"more than {self._limit():.1f} µs would be slower than SB3"
        return f"{'; '.join(map(str, self._results()))}; {limit}"


class _Candidate:
    """One codec, and what it has needed so far."""

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
        self._seconds, self._n_observations, self._first = 0.0, 0, int(store.heads.max())
        # In case that less is encoded from now on than waits to be.
        oldest = int(store.heads.min()) - store.ring.shape[1] - self._layout.stack - 1
        self._oldest = np.full(store.n_lanes, max(oldest, 0))
        store.take_mean_frame_bytes()  # of what was encoded so far

    def store(self, observations: npt.NDArray[Any]) -> None:
        began = cpu_time()
        self._store.append(self._lanes, observations, lambda: self._oldest)
        self._seconds += cpu_time() - began
        self._n_observations += len(observations)

    def measure_reading(self, cold: ColdMemory) -> bool:
        """Measure for a moment how long reading takes. Returns whether that was enough."""
        store = self._store
        if self._reading is None:
            # Frames that wait for their record are raw, so with "none" they are read as all others are.
            stop = int((store.heads if self._recipe == NONE else store.encoded).min()) - self._layout.stack
            first = max(min(self._first, stop - 1), 0)
            self._reading = ReadingTime(StoreReader(store, self._lanes, first, stop))
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
            self._store.take_mean_frame_bytes() or raw_bytes,
            1e6 * self._seconds / max(self._n_observations, 1) + 1e-3,
            reading,
            len(self._store.codec.reference_frames) > 1,
        )
