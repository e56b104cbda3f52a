"""``auto`` over the life of a buffer: when it tries codecs, and which one the store is to use from then on."""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import numpy.typing as npt

from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.choice import (
    NONE,
    TRIALS,
    PlannedTrials,
    Trials,
    first_recipe,
    is_worth_compressing,
    measuring_steps,
    trial_steps,
    with_best_length,
)
from sb3_extra_buffers.storage.config import CodecRecipe, StorageConfig
from sb3_extra_buffers.storage.frame_store import FrameStore

logger = logging.getLogger("sb3_extra_buffers")

_GOOD_ENOUGH_FOR_MEMORY = 1 / 12
"""With ``prefer="memory"``, the first codec compresses most, so no trial is needed up to this share of a raw frame."""
_DRIFT = 1.5
"""Codecs are tried again when frames have become larger or smaller by this factor."""
_FEWEST_FRAMES = 64
"""The mean size of fewer frames says little."""


class Decision(NamedTuple):
    """The codec to use from now on, and why."""

    recipe: CodecRecipe
    reason: str
    frame_bytes: float
    """The mean size of frames with this codec."""
    n_done: int
    """How many of the planned trials are done by then."""


class _Running(NamedTuple):
    trials: Trials
    n_done: int
    """How many of the planned trials are done when this one is."""


class AutoMethod:
    """Tries codecs at planned steps, and again when the size of frames has changed.

    Trials take memory. A buffer that is filled only once must not keep it, so a trial begins only if it ends before the
    buffer is full for the first time, or after that.
    """

    def __init__(self, config: StorageConfig, n_slots: int, n_envs: int, has_elements: bool) -> None:
        self.is_on = config.recipe is None and has_elements
        self._prefer, self._n_slots, self._n_envs = config.prefer, n_slots, n_envs
        self._running: _Running | None = None
        self._n_done = 0
        """How many of the planned trials are done, or were not needed."""
        self._usual_frame_bytes: float | None = None
        """The mean size of frames when the codec was chosen."""

    @property
    def is_trying(self) -> bool:
        return self._running is not None

    def add(self, observations: npt.NDArray[Any]) -> None:
        """Let the codecs that are tried store the observations of a step."""
        if self._running is not None:
            self._running.trials.add(observations)

    def next_step(self, step: int, frames: FrameStore) -> float:
        """The next step at which there may be a decision."""
        if self._running is not None:
            return step + 1
        if not self.is_on or self._n_done == len(TRIALS):
            return math.inf
        return self._begin_of(TRIALS[self._n_done], step + 1, frames)

    def decision(self, step: int, frames: FrameStore, recipe: CodecRecipe) -> Decision | None:
        """Begin a planned trial if it is due, and decide when one is complete. Call :meth:`settle` with the decision.

        :param frames: The store of the codec in use, which ``recipe`` describes.
        """
        if self._running is not None:
            trials, n_done = self._running
            if not trials.is_complete:
                return None
            best = trials.best()
            return Decision(best.recipe, str(trials), best.frame_bytes, n_done)
        if not self.is_on or self._n_done == len(TRIALS) or step < TRIALS[self._n_done].begin:
            return None
        planned, n_done, layout = TRIALS[self._n_done], self._n_done + 1, frames.layout
        frame_bytes, raw_bytes = frames.mean_frame_bytes(), layout.frame.nbytes
        if not is_worth_compressing(layout):
            return Decision(recipe, f"frames of {raw_bytes} bytes are too small to compress", raw_bytes, n_done)
        if frame_bytes is not None and self._is_good_enough(frame_bytes, planned.good_enough, frames, recipe):
            ratio = frame_bytes / raw_bytes
            reason = f"{recipe.method} compresses frames to {100 * ratio:.1f}%, so nothing else was tried"
            return Decision(with_best_length(recipe, ratio), reason, frame_bytes, n_done)
        if self._fits(step, planned.n_steps, frames):
            self._begin(step, planned.n_steps, frames, recipe, n_done)
        return None

    def settle(self, decision: Decision, frames: FrameStore) -> None:
        """The store uses the codec of a decision now. Until then, it is made again at every step."""
        if self._running is not None:
            logger.info("%s was chosen: %s", frames.codec.label, decision.reason)
        frames.restart_mean()
        self._running, self._n_done, self._usual_frame_bytes = None, decision.n_done, decision.frame_bytes

    def review(self, step: int, frames: FrameStore, recipe: CodecRecipe) -> None:
        """Begin a long trial if the size of frames has changed since the last choice.

        If it has, the time to read them has changed, too, and may now be longer than ``auto`` allows.
        """
        frame_bytes = frames.mean_frame_bytes(_FEWEST_FRAMES)
        if not self.is_on or self._running is not None or frame_bytes is None:
            return
        frames.restart_mean()
        usual = self._usual_frame_bytes
        if usual is None or self._is_good_enough(frame_bytes, TRIALS[-1].good_enough, frames, recipe):
            self._usual_frame_bytes = frame_bytes
        elif usual / _DRIFT <= frame_bytes <= usual * _DRIFT or not is_worth_compressing(frames.layout):
            pass
        elif self._fits(step, None, frames):
            self._begin(step, None, frames, recipe, len(TRIALS))  # it is long, so no planned one is needed

    def steps_until_settled(self, step: int, frames: FrameStore) -> int:
        """The most steps until all planned trials are done; 0 if they are. Later ones depend on the data."""
        left = 0 if self._running is None else self._running.trials.steps_left
        n_done = self._n_done if self._running is None else self._running.n_done
        if self.is_on and n_done < len(TRIALS) and is_worth_compressing(frames.layout):
            begin = self._begin_of(TRIALS[-1], step + left, frames)
            stored = trial_steps(frames.layout, self._n_envs, TRIALS[-1].n_steps, self._most_steps(begin, frames))
            left = begin - step + stored + measuring_steps(frames.layout, self._prefer)
        return left

    def _begin_of(self, planned: PlannedTrials, earliest: int, frames: FrameStore) -> int:
        """The step at which a planned trial begins, if not before the step ``earliest``."""
        begin = max(planned.begin, earliest)
        return begin if self._fits(begin, planned.n_steps, frames) else self._n_slots + 1

    def _begin(self, step: int, n_steps: int | None, frames: FrameStore, recipe: CodecRecipe, n_done: int) -> None:
        most_steps = self._most_steps(step, frames)
        trials = Trials(frames.layout, self._n_envs, n_steps, most_steps, self._prefer, recipe)
        self._running = _Running(trials, n_done)

    def _fits(self, step: int, n_steps: int | None, frames: FrameStore) -> bool:
        """Whether a trial that begins at this step, and is as short as possible, ends in time."""
        return trial_steps(frames.layout, self._n_envs, n_steps, 0) <= self._room(step, frames)

    def _room(self, step: int, frames: FrameStore) -> float:
        """How many steps a trial that begins at this step may store."""
        if step > self._n_slots:
            return math.inf
        return self._n_slots - step - measuring_steps(frames.layout, self._prefer)

    def _most_steps(self, step: int, frames: FrameStore) -> float:
        """The limit for a trial that measures reading well: a quarter of a buffer that is not full yet."""
        return math.inf if step > self._n_slots else min(self._n_slots // 4, self._room(step, frames))

    def _is_good_enough(self, frame_bytes: float, share: float, frames: FrameStore, recipe: CodecRecipe) -> bool:
        """Whether the first codec of ``auto`` is in use, and makes frames so small that no other need be tried."""
        if self._prefer == "memory":
            share = max(share, _GOOD_ENOUGH_FOR_MEMORY)
        first = first_recipe(frames.layout, self._prefer)
        is_first = recipe != NONE and recipe.method == first.method
        return is_first and frame_bytes <= share * frames.layout.frame.nbytes

    def state(self) -> State:
        # Trials that are not complete begin again.
        return {"usual_frame_bytes": self._usual_frame_bytes, "n_trials": self._n_done}

    def restore(self, state: SavedState) -> None:
        if self.is_on:
            self._usual_frame_bytes = state.number("usual_frame_bytes") if state.has("usual_frame_bytes") else None
            self._n_done = min(state.integer("n_trials"), len(TRIALS)) if state.has("n_trials") else 0
