"""Observations as compressed frames.

The store decides how observations are cut into frames and, with ``auto``, by which codec they are compressed.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.choice import choose_codec
from sb3_extra_buffers.storage.config import CodecRecipe
from sb3_extra_buffers.storage.digests import Digests
from sb3_extra_buffers.storage.gathering import gather_observations
from sb3_extra_buffers.storage.observation_index import EarlierCodec, ObservationIndex
from sb3_extra_buffers.storage.pickling import arguments_of, upgraded_attributes
from sb3_extra_buffers.storage.stacking import RGB, StackLayout, declared_layout, detect_layout

logger = logging.getLogger("sb3_extra_buffers")

CPU = th.device("cpu")
_DECISION_STEPS = 64
_DECISION_BYTES = 4 << 20
_FEWEST_STEPS = 34  # two records of 16 frames and the start of a third
_DELTA_ACCEPT_RATIO = 1 / 4
_RECHECK_STEP = 512
"""The first steps of an episode are often all alike, so ``auto`` checks its choice once more at this step."""
_RECHECK_STEPS = 192
"""How many steps it checks its choice with."""
_MOST_CODECS = 4
"""In use at the same time, while earlier ones still hold observations."""
REVIEW_STEPS = 2048
_LAST_FRAME_NUMBER = (1 << 32) - (1 << 20)
"""Close to the limit of an index entry, with room for the frames that arrive between two reviews."""
_NO_COMPRESSION = CodecRecipe(parse_method("none"))

Appended = tuple[Sequence[Indices | int], Sequence[Digests] | None]
"""Observations whose frames are stored, but that are in no slot yet: for each of them, the numbers of the frames after
its last ones, and its checksums."""


class ObservationStore(ObservationIndex):
    """Observations as compressed frames, which columns share.

    The first decision how to store observations falls after a few dozen steps. Until then they are not compressed.
    ``auto`` checks it soon after, and whenever the size of compressed frames has changed.
    """

    def __init__(self, n_slots: int, n_envs: int, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        super().__init__(n_slots, n_envs, shape, *args, **kwargs)
        self._has_elements = math.prod(shape) > 0
        self._all_lanes = np.arange(n_envs)
        self._steps = 0
        self._decide_at: int | None = None
        """The step of the first decision; ``None`` once it has been made."""
        self._recheck_at: int | None = _RECHECK_STEP if self.config.recipe is None else None
        """The next step at which ``auto`` checks whether another codec has become better."""
        self._saved_steps: list[npt.NDArray[Any]] = []
        """Steps that a decision needs and that have been overwritten or cleared."""
        self._usual_frame_bytes: float | None = None
        self._start()

    @property
    def label(self) -> str:
        """The method in use, for people."""
        if self._decide_at is not None:
            return f"{self.config.recipe.method if self.config.recipe else 'auto'} (not enough seen yet)"
        return self.codec.label if self.config.recipe else f"{self.codec.label} (auto)"

    def index_bytes(self, filled: float) -> int:
        """The size of what finds observations when this part of the slots is filled."""
        arrays = [*self.ends, *(self.digests.columns if self.digests else [])]
        entries = round(filled * sum(array.nbytes for array in arrays))
        return entries + sum(frames.index_bytes for frames in self.frame_stores)

    def prepare(self, n_observations: int, slot: int | None = None) -> None:
        may_decide = self._decide_at is not None or self._recheck_at is not None
        if may_decide and slot is not None and self._is_collecting_steps and self.ends[0][slot].all():
            self._save_steps([slot])
        if self._has_elements:
            self.frames.make_room(n_observations, self._oldest)

    def append(self, observations: Sequence[npt.NDArray[Any]], lanes: Indices | None = None) -> Appended:
        digests = self._digests_of(observations)
        if not self._has_elements:
            return [0] * len(observations), digests
        where = self._all_lanes if lanes is None else lanes
        if len(observations) == 2:
            return self.frames.append_pairs(where, observations, self._oldest), digests
        return [self.frames.append(where, observations[0], self._oldest)], digests

    def place(self, places: Sequence[tuple[int, int]], appended: Appended, lanes: Indices | None = None) -> None:
        ends, digests = appended
        for i, (column, slot) in enumerate(places):
            if slot >= self.slots_used:  # first: frames of slots that are not in use are released
                self.slots_used = slot + 1
            self.ends[column][slot if lanes is None else (slot, lanes)] = ends[i]
        if digests is not None:
            self._place_digests(places, digests, lanes)

    def finish_step(self) -> None:
        """Decide, once in a while, how to go on."""
        self._steps += 1
        # Not only at the planned step: a decision that was interrupted then is made now.
        if self._decide_at is not None and self._steps >= self._decide_at:
            self.decide()
        if self._steps % REVIEW_STEPS == 0 or self._recheck_is_due:
            self._review()
        if self.frames.arena.nbytes > self._compact_at:
            self.compact()

    def _fill(self, wanted: list[tuple[int, Indices]], envs: Indices, outs: list[npt.NDArray[Any]]) -> None:
        firsts = self._firsts(wanted, envs)
        if firsts.min(initial=0) < 0:
            self._read_with_gaps(envs, firsts, outs)
        elif len(envs):
            gather_observations(self.frame_stores, self.layout, envs, firsts, outs)

    def clear(self) -> None:
        """Remove all observations. The codec keeps what it has learnt from them."""
        with self.lock.held:
            if self._is_collecting_steps:
                self._save_steps(self.slots_by_age(self.ends[0]))
            for ends in self.ends:
                ends[: self.slots_used] = 0
            if self.digests is not None:
                self.digests.clear(self.slots_used)
            self._earlier = []
            self.frames.clear()

    def check(self) -> None:
        with self.lock.held:
            self.check_index()

    def decide(self) -> None:
        """Choose the layout and the codec from the newest observations."""
        steps = self._recent_steps(_DECISION_STEPS)
        layout = detect_layout(steps) if self.config.frame_stack == "auto" else self.layout
        if layout.stack == 1 and self._steps < _FEWEST_STEPS:  # nothing may have moved yet
            self._decide_at = self._steps + 1
            return
        recipe = self.config.recipe or choose_codec(layout, steps, delta_accept_ratio=_DELTA_ACCEPT_RATIO).recipe
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
        """Check whether the choice of the codec is still right, and do what is due once in a while."""
        if self.frames.heads.max() > _LAST_FRAME_NUMBER:
            self.renumber()
        self.release_earlier()
        if self.config.recipe is not None or self._decide_at is not None:
            return
        frame_bytes = self.frames.take_mean_frame_bytes()
        usual, self._usual_frame_bytes = self._usual_frame_bytes, frame_bytes
        has_drifted = usual is not None and not usual / 2 <= frame_bytes <= usual * 2
        if not self._recheck_is_due and not has_drifted:
            return
        steps = self._recent_steps(_RECHECK_STEPS)
        if len(steps) < _FEWEST_STEPS:  # as after a reset: wait for some more
            self._recheck_at = self._steps + _FEWEST_STEPS
            return
        best = choose_codec(self.layout, steps, self.recipe if has_drifted else None)
        self._recheck_at, self._saved_steps = None, []
        if best.recipe != self.recipe and len(self._earlier) < _MOST_CODECS:
            logger.info("Observations have changed: %s instead of %s", best.recipe.method, self.codec.label)
            self._usual_frame_bytes = None
            self.change_codec(best.recipe)

    @property
    def _recheck_is_due(self) -> bool:
        return self._recheck_at is not None and self._decide_at is None and self._steps >= self._recheck_at

    @property
    def _is_collecting_steps(self) -> bool:
        """Whether a decision is near that needs steps which may be overwritten before it."""
        if self._decide_at is not None:
            return True
        return self._recheck_at is not None and self._steps >= self._recheck_at - _RECHECK_STEPS

    def _save_steps(self, slots: Sequence[int] | Indices) -> None:
        saved = [*self._saved_steps, *self._steps_at(np.asarray(slots))]
        self._saved_steps = saved[-self._most_steps(_RECHECK_STEPS) :]

    def _recent_steps(self, most: int) -> npt.NDArray[Any]:
        """The newest observations of all environments, ``(steps, n_envs, *shape)``, oldest first."""
        most = self._most_steps(most)
        stored = self._steps_at(self.slots_by_age(self.ends[0])[-most:])
        return np.array([*self._saved_steps, *stored][-most:], dtype=self.stored_dtype)

    def _most_steps(self, most: int) -> int:
        return max(_FEWEST_STEPS, min(most, 8 * _DECISION_BYTES // self._step_bytes))

    @property
    def _step_bytes(self) -> int:
        return self.n_envs * math.prod(self.shape) * self.stored_dtype.itemsize

    def _start(self) -> None:
        config = self.config
        if not self._has_elements:
            self._recheck_at = None
            self.use(StackLayout((1,), self.stored_dtype), _NO_COMPRESSION)  # nothing will ever be in there
            return
        layout = StackLayout(self.shape, self.stored_dtype)
        if isinstance(config.frame_stack, int):
            layout = declared_layout(self.shape, self.stored_dtype, config.frame_stack)
        if config.recipe is not None:
            # Wrong options are reported now, not after the first steps.
            config.recipe.build(layout.likely_frame if config.frame_stack == "auto" else layout.frame)
            if config.frame_stack != "auto" or max(self.shape, default=1) == 1:
                self.use(layout, config.recipe)
                return
        enough = max(_FEWEST_STEPS, min(_DECISION_STEPS, _DECISION_BYTES // self._step_bytes))
        # Steps of short rollouts are saved until there are enough of them to choose a codec by.
        self._decide_at = min(enough, self.n_slots if config.recipe else max(self.n_slots, _FEWEST_STEPS))
        self.use(layout, _NO_COMPRESSION)

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
            "decide_at": self._decide_at,
            "usual_frame_bytes": self._usual_frame_bytes,
        }

    def restore(self, state: SavedState) -> None:
        self._steps = state.integer("steps")
        self._decide_at = state.integer("decide_at") if state.has("decide_at") else None
        self._usual_frame_bytes = state.number("usual_frame_bytes") if state.has("usual_frame_bytes") else None
        if self._recheck_at is not None and self._steps >= self._recheck_at:
            self._recheck_at = None
        self._compact_at = state.integer("compact_at")
        layout = StackLayout.restored(state.part("layout"), self.shape, self.stored_dtype)
        parts = state.part("earlier").parts() if state.has("earlier") else []
        self._earlier = []
        for part in parts:
            self.use(layout, CodecRecipe.restored(part))
            self.frames.restore(part.part("frames"))
            self._earlier.append(EarlierCodec(self.recipe, self.frames))
        self.use(layout, CodecRecipe.restored(state))
        self.frames.restore(state.part("frames"))
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
            pickled = {"arguments": arguments_of(self), "state": self.state()}
        super().__setstate__(pickled)
