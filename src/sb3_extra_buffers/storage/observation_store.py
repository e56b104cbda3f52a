"""Observations as compressed frames.

The store decides how to cut observations into frames and, with ``auto``, which codec compresses them.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.auto import AutoMethod
from sb3_extra_buffers.storage.choice import NONE, first_recipe
from sb3_extra_buffers.storage.compiled_gathering import NO_NUMBERS, Sources, Wanted, fill_rows
from sb3_extra_buffers.storage.config import CodecRecipe
from sb3_extra_buffers.storage.digests import Digests
from sb3_extra_buffers.storage.gathering import gather_observations, gather_runs
from sb3_extra_buffers.storage.observation_index import EarlierCodec, ObservationIndex
from sb3_extra_buffers.storage.pickling import arguments_of, upgraded_attributes
from sb3_extra_buffers.storage.stacking import RGB, StackLayout, declared_layout, detect_layout, n_changes

logger = logging.getLogger("sb3_extra_buffers")

_FIRST_DETECTION_STEP = 4
"""The step at which the store first detects stacked frames: early, so that few observations have to be stored again."""
_DECISION_STEPS = 64
"""If no stack was detected until this step, observations are not stacked."""
_DECISION_BYTES = 4 << 20
"""That step comes sooner if steps are large: after this many bytes, but not before ``_FEWEST_STEPS``."""
_FEWEST_STEPS = 34
_ENOUGH_CHANGES = 8  # if this many observations have changed without a stack, there is no need to wait for more
_MOST_CODECS = 4
"""The most replaced codecs that may still hold observations."""
_FIRST_REVIEW, REVIEW_STEPS = 1024, 2048
_RELEASE_STEPS = 128
"""How often the memory of replaced codecs is released, in steps."""
_LAST_FRAME_NUMBER = (1 << 32) - (1 << 20)
"""Beyond it, frames are renumbered. It leaves room below the limit of uint32 for the frames between two reviews."""

Appended = tuple[Sequence[Indices | int], Sequence[Digests] | None]
"""Observations whose frames are stored, but that are in no slot yet: for each of them, the number of the frame after
its last one in each lane, and its checksums."""


class ObservationStore(ObservationIndex):
    """Observations as compressed frames, which columns share.

    During the first steps, which are not compressed, the store detects how observations stack frames. Then ``auto``
    begins with ``delta``. It tries other codecs soon after, and again when the size of compressed frames has changed.
    """

    reads_runs = False
    """Whether batches consist of consecutive observations, as those of sequence buffers do."""

    def __init__(self, n_slots: int, n_envs: int, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        super().__init__(n_slots, n_envs, shape, *args, **kwargs)
        self._has_elements = math.prod(shape) > 0
        self._sources = Sources()
        self._all_lanes = np.arange(n_envs)
        self._steps = 0
        self._auto = AutoMethod(self.config, n_slots, n_envs, self._has_elements)
        self._decide_by = 0
        """The step at which to decide, at the latest, that observations are not stacked."""
        self._next_due = 0.0
        """The next step at which something is due: a decision, a trial or a review."""
        self._decide_at: int | None = None
        """The next step at which to detect how observations stack frames; ``None`` once that is decided."""
        self._saved_steps: list[npt.NDArray[Any]] = []
        """Overwritten or cleared steps that are still needed to detect stacked frames."""
        self._start()

    @property
    def label(self) -> str:
        """The compression method in use, as text for users."""
        if self._decide_at is not None:
            return f"{self.config.recipe.method if self.config.recipe else 'auto'} (not enough seen yet)"
        return self.codec.label if self.config.recipe else f"{self.codec.label} (auto)"

    @property
    def steps_until_settled(self) -> int:
        return self._auto.steps_until_settled(self._steps, self.frames) if self._auto.is_on else 0

    def index_bytes(self, filled: float) -> int:
        """The bytes of the index that finds observations, when a share of the slots, ``filled``, is in use."""
        arrays = [*self.ends, *(self.digests.columns if self.digests else [])]
        entries = round(filled * sum(array.nbytes for array in arrays))
        return entries + sum(frames.index_bytes for frames in self.frame_stores)

    def prepare(self, n_observations: int, slot: int | None = None) -> None:
        if self._decide_at is not None and slot is not None and self.ends[0][slot].all():
            self._save_steps([slot])
        if self._has_elements:
            self.frames.make_room(n_observations, self._oldest)

    def stage(self, slot: int, pair: Sequence[npt.NDArray[Any]]) -> Appended:
        self.prepare(2, slot)
        return self.append(pair)

    def append(self, observations: Sequence[npt.NDArray[Any]], lanes: Indices | None = None) -> Appended:
        digests = self._digests_of(observations)
        if not self._has_elements:
            return [0] * len(observations), digests
        if lanes is None:
            self._auto.add(observations[0])
        where = self._all_lanes if lanes is None else lanes
        if len(observations) == 2:
            return self.frames.append_pairs(where, observations, self._oldest), digests
        return [self.frames.append(where, observations[0], self._oldest)], digests

    def place(self, places: Sequence[tuple[int, int]], appended: Appended, lanes: Indices | None = None) -> None:
        ends, digests = appended
        for i, (column, slot) in enumerate(places):
            if slot >= self.slots_used:  # first, because frames that only unused slots refer to are released
                self.slots_used = slot + 1
            self._is_current[slot // self._piece] = False
            self.ends[column][slot if lanes is None else (slot, lanes)] = ends[i]
        if digests is not None:
            self._place_digests(places, digests, lanes)

    def is_shared(self, previous: int, slot: int) -> npt.NDArray[np.bool_]:
        shared: npt.NDArray[np.bool_] = self.ends[1][previous] == self.ends[0][slot]
        return shared

    def finish_step(self) -> None:
        """Do what is due once in a while: decisions, trials and reviews."""
        self._steps += 1
        if self._steps >= self._next_due:
            self._do_due_work()
        if self.frames.arena.nbytes > self._compact_at:
            self.compact()

    def adopt(self, layout: StackLayout, recipe: CodecRecipe, shared: SavedState) -> bool:
        """Change to a codec that can hold the records of another store, given the shared state of that store's codec.

        Returns false if stored observations stack frames in another way, or too many codecs still hold observations.
        """
        if not self.slots_used or self._decide_at is not None:
            (self.rebuild if self.slots_used else self.use)(layout, recipe)
            self._decide_at, self._saved_steps = None, []
        elif layout != self.layout:
            return False
        elif recipe != self.recipe or not self.codec.has_portable_records or not self.codec.accepts(shared):
            self.release_earlier()
            if len(self._earlier) >= _MOST_CODECS:
                return False
            self.change_codec(recipe)
        return self.codec.accepts(shared)

    def release_earlier(self) -> None:
        n_earlier = len(self._earlier)
        super().release_earlier()
        if len(self._earlier) < n_earlier:
            self._sources = Sources()  # it would keep the index and the ring of the codecs that are gone

    def finish_copying(self) -> None:
        """Called after records were copied into this store, instead of :meth:`finish_step`."""
        if self.frames.heads.max() > _LAST_FRAME_NUMBER:
            self.renumber()
        self.release_earlier()
        if self.frames.arena.nbytes > self._compact_at:
            self.compact()

    def _fill(self, wanted: Wanted, envs: Indices, outs: list[npt.NDArray[Any]]) -> None:
        left = None if self.reads_runs else self._sources.fill([self], NO_NUMBERS, wanted, envs, outs)
        if left is None:
            self._fill_by_codec(wanted, envs, outs)
        elif len(left):
            fill_rows(left, wanted, envs, outs, self._fill_by_codec)

    def _fill_by_codec(self, wanted: Wanted, envs: Indices, outs: list[npt.NDArray[Any]]) -> None:
        firsts = self._firsts(wanted, envs)
        if firsts.min(initial=0) < 0:
            self._read_with_gaps(envs, firsts, outs)
        elif len(envs):
            gather = gather_runs if self.reads_runs else gather_observations
            gather(self.frame_stores, self.layout, envs, firsts, outs)

    def clear(self) -> None:
        """Remove all observations. The codec keeps what it has learnt from them."""
        with self.lock.held:
            if self._decide_at is not None:
                self._save_steps(self.slots_by_age(self.ends[0]))
            self._is_current[:] = False
            for ends in self.ends:
                ends[: self.slots_used] = 0
            if self.digests is not None:
                self.digests.clear(self.slots_used)
            self._earlier, self._sources = [], Sources()
            self.frames.clear()

    def check(self) -> None:
        with self.lock.held:
            self.check_index()

    def _do_due_work(self) -> None:
        """Do what is due at this step. If that is interrupted, it is due again at the next."""
        if self._decide_at is not None:
            if self._steps >= self._decide_at:
                self.decide()
        else:
            self._follow_auto()
        if self._steps % REVIEW_STEPS == 0 or self._steps == _FIRST_REVIEW:
            self._review()
        elif self._steps % _RELEASE_STEPS == 0:
            self.release_earlier()
        regularly = [REVIEW_STEPS, _RELEASE_STEPS] if self._earlier else [REVIEW_STEPS]
        due: list[float] = [(self._steps // steps + 1) * steps for steps in regularly]
        if self._steps < _FIRST_REVIEW:
            due.append(_FIRST_REVIEW)
        if self._decide_at is not None:
            due.append(self._decide_at)
        else:
            due.append(self._auto.next_step(self._steps, self.frames))
        self._next_due = min(due)

    def _follow_auto(self) -> None:
        decision = self._auto.decision(self._steps, self.frames, self.recipe)
        if decision is None:
            return
        if decision.recipe != self.recipe and len(self._earlier) < _MOST_CODECS:
            self.change_codec(decision.recipe)
        self.choice = decision.reason
        self._auto.settle(decision, self.frames)

    def decide(self) -> None:
        """Detect how observations stack frames, and store those that are here accordingly."""
        steps = self._recent_steps()
        layout = detect_layout(steps)
        if layout.stack == 1 and self._steps < self._decide_by and n_changes(steps) < _ENOUGH_CHANGES:
            self._decide_at = min(4 * self._steps, self._decide_by)
            return
        recipe = self.config.recipe or first_recipe(layout, self.config.prefer)
        if recipe.options.get("indexed_colour") and layout.frame.channels != RGB:
            warnings.warn(
                f"Observations of shape {self.shape} are not RGB, so they are stored without indexed_colour. Leave it "
                "out of compression_kwargs.",
                stacklevel=2,
            )
            recipe = recipe.without("indexed_colour")
        self._decide_at, self._saved_steps = None, []
        try:
            self.rebuild(layout, recipe)
        except BaseException:
            self._decide_at = self._steps + 1
            raise
        logger.info("%s, frame stack %d, for observations of shape %s", self.codec.label, layout.stack, self.shape)

    def _review(self) -> None:
        """Renumber and release frames if necessary, and let ``auto`` check whether its choice still fits."""
        if self.frames.heads.max() > _LAST_FRAME_NUMBER:
            self.renumber()
        self.release_earlier()
        if self._decide_at is None:
            self._auto.review(self._steps, self.frames, self.recipe)

    def _save_steps(self, slots: Sequence[int] | Indices) -> None:
        saved = [*self._saved_steps, *self._steps_at(np.asarray(slots))]
        self._saved_steps = saved[-self._most_steps :]

    def _recent_steps(self) -> npt.NDArray[Any]:
        """The newest observations of all environments, ``(steps, n_envs, *shape)``, oldest first."""
        stored = self._steps_at(self.slots_by_age(self.ends[0])[-self._most_steps :])
        return np.array([*self._saved_steps, *stored][-self._most_steps :], dtype=self.stored_dtype)

    @property
    def _most_steps(self) -> int:
        """The largest number of steps to look at when the frame stack is detected."""
        return max(_FEWEST_STEPS, min(_DECISION_STEPS, 8 * _DECISION_BYTES // self._step_bytes))

    @property
    def _step_bytes(self) -> int:
        return self.n_envs * math.prod(self.shape) * self.stored_dtype.itemsize

    def _start(self) -> None:
        config, layout = self.config, StackLayout(self.shape, self.stored_dtype)
        if not self._has_elements:
            self.use(StackLayout((1,), self.stored_dtype), NONE)  # it stays empty
            return
        if isinstance(config.frame_stack, int):
            layout = declared_layout(self.shape, self.stored_dtype, config.frame_stack)
        if config.recipe is not None:
            # Wrong options are reported now, not after the first steps.
            config.recipe.build(layout.likely_frame if config.frame_stack == "auto" else layout.frame)
        if config.frame_stack != "auto" or max(self.shape, default=1) == 1:
            self.use(layout, config.recipe or first_recipe(layout, config.prefer))
            return
        enough = max(_FEWEST_STEPS, min(_DECISION_STEPS, _DECISION_BYTES // self._step_bytes))
        self._decide_by = min(enough, self.n_slots) if config.recipe else enough
        self._decide_at = min(_FIRST_DETECTION_STEP, self._decide_by)
        self.use(layout, NONE)

    def state(self) -> State:
        return {
            "layout": self.layout.state(),
            **self.recipe.state(),
            "compact_at": self._compact_at,
            "ends": {str(column): ends for column, ends in enumerate(self.ends)},
            "digests": {} if self.digests is None else self.digests.state(),
            "frames": self.frames.state(),
            "earlier": {
                str(i): {**recipe.state(), "frames": frames.state()} for i, (recipe, frames) in enumerate(self._earlier)
            },
            "steps": self._steps,
            "choice": self.choice,
            "decide_at": self._decide_at,
            **self._auto.state(),
        }

    def restore(self, state: SavedState) -> None:
        self._steps = state.integer("steps")
        self._decide_at = state.integer("decide_at") if state.has("decide_at") else None
        self._auto.restore(state)
        self.choice = str(state.value("choice")) if state.has("choice") else ""
        self._compact_at = state.integer("compact_at")
        layout = self.layout
        if self._has_elements:
            layout = StackLayout.restored(state.part("layout"), self.shape, self.stored_dtype)
        parts = state.part("earlier").parts() if state.has("earlier") else []
        self._earlier = []
        for part in parts:
            self.use(layout, CodecRecipe.restored(part))
            self.frames.restore(part.part("frames"))
            self._earlier.append(EarlierCodec(self.recipe, self.frames))
        self.use(layout, CodecRecipe.restored(state))
        self.frames.restore(state.part("frames"))
        self._is_current[:] = False
        self._restore_columns(state.part("ends"), self.ends)
        self.slots_used = self.n_slots
        self._restore_digests(state)
        try:
            self.check()
        except CorruptDataError as error:
            raise state.error("frames", f"contradicts itself: {error}") from error

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        if "state" not in pickled:
            vars(self).update(upgraded_attributes(pickled))
            self._auto = AutoMethod(self.config, self.n_slots, self.n_envs, has_elements=True)
            pickled = {"arguments": arguments_of(self), "state": self.state()}
        super().__setstate__(pickled)
