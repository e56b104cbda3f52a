"""The store of a buffer's observations, which finds out how to store them."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import FrameSpec, Indices
from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.choice import choose_codec
from sb3_extra_buffers.storage.config import CodecRecipe, StorageConfig
from sb3_extra_buffers.storage.observation_slots import CPU, ObservationSlots
from sb3_extra_buffers.storage.stacking import RGB, StackLayout, declared_layout, detect_layout

__all__ = ["CPU", "REVIEW_STEPS", "ObservationStore"]

logger = logging.getLogger("sb3_extra_buffers")

_DECISION_STEPS = 64
_DECISION_BYTES = 4 << 20
_FEWEST_STEPS = 34  # two chains of 16 frames and the start of a third
_DELTA_ACCEPT_RATIO = 1 / 4
_RECONSIDER_AT = 512
_RECONSIDER_STEPS = 192
"""The first steps of an episode are often all alike, so what was chosen by them is looked at once more."""
_MOST_CODECS = 4
"""In use at the same time, while observations of earlier ones are left."""
REVIEW_STEPS = 2048
_LAST_FRAME_NUMBER = (1 << 32) - (1 << 20)
"""Close to what an index entry can hold, with room for the frames that arrive between two reviews."""
_AS_THEY_ARE = CodecRecipe(parse_method("none"))


class ObservationStore(ObservationSlots):
    """Decides how observations are cut into frames and, with ``auto``, which codec is right for them.

    The first decision falls after a few dozen steps, until which observations are kept as they are. ``auto`` looks at
    it once more soon after, and whenever the size of compressed frames has changed.
    """

    def __init__(
        self,
        n_slots: int,
        n_envs: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        config: StorageConfig,
        **kwargs: Any,
    ) -> None:
        super().__init__(n_slots, n_envs, shape, dtype, config.stored_dtype(dtype), **kwargs)
        self.config = config
        self._steps = 0
        self._decide_at: int | None = None
        self._reconsider_at: int | None = _RECONSIDER_AT if config.recipe is None else None
        """The next step at which ``auto`` looks whether another codec has become better."""
        self._forgotten: list[npt.NDArray[Any]] = []
        """Steps that were overwritten or cleared while they were wanted for a decision."""
        self._usual_frame_bytes: float | None = None
        self._start()

    @property
    def label(self) -> str:
        """The method in use, for people."""
        if self._decide_at is not None:
            return f"{self.config.recipe.method if self.config.recipe else 'auto'} (not enough seen yet)"
        return self.codec.label if self.config.recipe else f"{self.codec.label} (auto)"

    def write(self, column: int, slot: int, observations: npt.NDArray[Any], lanes: Indices | None = None) -> None:
        """Store :meth:`checked` observations, one for each environment or for each of ``lanes``."""
        with self.lock.held:
            self.prepare(1, slot if column == 0 else None)
            self.place([(column, slot)], self.append([observations], lanes), lanes)
            if column == 0:
                self.finish_step()

    def prepare(self, n_observations: int, slot: int | None = None) -> None:
        """Make room for so many observations of each environment. All that can fail happens here.

        :param slot: The slot of the first column that is going to be overwritten.
        """
        may_decide = self._decide_at is not None or self._reconsider_at is not None
        if may_decide and slot is not None and self._wants_steps and self.ends[0][slot].all():
            self._remember([slot])
        if self._has_elements:
            self.frames.make_room(n_observations, self._oldest)

    def finish_step(self) -> None:
        """To be called when a step is complete: decides, once in a while, how to go on."""
        self._steps += 1
        # Not just at the step that was planned: what was interrupted then is done now.
        if self._decide_at is not None and self._steps >= self._decide_at:
            self.decide()
        if self._steps % REVIEW_STEPS == 0 or self._is_to_reconsider:
            self._review()
        if self.frames.arena.nbytes > self._compact_at:
            self.compact()

    def clear(self) -> None:
        with self.lock.held:
            if self._wants_steps:
                self._remember(self._by_age(self.ends[0]))
            super().clear()

    def decide(self) -> None:
        """Choose the layout and the codec from the newest observations."""
        steps = self._recent_steps(_DECISION_STEPS)
        layout = detect_layout(steps) if self.config.frame_stack == "auto" else self.layout
        if layout.stack == 1 and self._steps < _FEWEST_STEPS:  # nothing may have moved yet
            self._decide_at = self._steps + 1
            return
        recipe = self.config.recipe or choose_codec(layout, steps, delta_serves_at=_DELTA_ACCEPT_RATIO).recipe
        if recipe.options.get("indexed_colour") and layout.frame.channels != RGB:
            warnings.warn(
                f"Observations of shape {self.shape} are not RGB, so they are stored without indexed_colour. Leave it "
                "out of compression_kwargs.",
                stacklevel=2,
            )
            recipe = recipe.without("indexed_colour")
        self._decide_at, self._forgotten = None, []
        try:
            self.rebuild(layout, recipe)
        except BaseException:
            self._decide_at = self._steps + 1
            raise
        logger.info("%s, frame stack %d, for observations of shape %s", self.codec.label, layout.stack, self.shape)

    def state(self) -> State:
        return {
            **super().state(),
            "steps": self._steps,
            "decide_at": self._decide_at,
            "usual_frame_bytes": self._usual_frame_bytes,
        }

    def restore(self, state: SavedState) -> None:
        self._steps = state.integer("steps")
        self._decide_at = state.integer("decide_at") if state.has("decide_at") else None
        self._usual_frame_bytes = state.number("usual_frame_bytes") if state.has("usual_frame_bytes") else None
        if self._reconsider_at is not None and self._steps >= self._reconsider_at:
            self._reconsider_at = None
        super().restore(state)

    def _review(self) -> None:
        """Look whether what was decided is still right."""
        if self.frames.heads.max() > _LAST_FRAME_NUMBER:
            self.renumber()
        self.release_earlier()
        if self.config.recipe is not None or self._decide_at is not None:
            return
        frame_bytes = self.frames.take_mean_frame_bytes()
        usual, self._usual_frame_bytes = self._usual_frame_bytes, frame_bytes
        drifted = usual is not None and not usual / 2 <= frame_bytes <= usual * 2
        if not self._is_to_reconsider and not drifted:
            return
        steps = self._recent_steps(_RECONSIDER_STEPS)
        if len(steps) < _FEWEST_STEPS:  # as after a reset: first see some more
            self._reconsider_at = self._steps + _FEWEST_STEPS
            return
        best = choose_codec(self.layout, steps, self.recipe if drifted else None)
        self._reconsider_at, self._forgotten = None, []
        if best.recipe != self.recipe and len(self._earlier) < _MOST_CODECS:
            logger.info("Observations have changed: %s instead of %s", best.recipe.method, self.codec.label)
            self._usual_frame_bytes = None
            self.change_codec(best.recipe)

    @property
    def _is_to_reconsider(self) -> bool:
        return self._reconsider_at is not None and self._decide_at is None and self._steps >= self._reconsider_at

    @property
    def _wants_steps(self) -> bool:
        """Whether a decision is near, for which steps are wanted that would be gone by then."""
        if self._decide_at is not None:
            return True
        return self._reconsider_at is not None and self._steps >= self._reconsider_at - _RECONSIDER_STEPS

    def _remember(self, slots: Sequence[int] | Indices) -> None:
        self._forgotten = [*self._forgotten, *self._steps_at(np.asarray(slots))][-self._most_steps(_RECONSIDER_STEPS) :]

    def _recent_steps(self, most: int) -> npt.NDArray[Any]:
        """The newest observations of all environments, ``(steps, n_envs, *shape)``, oldest first."""
        most = self._most_steps(most)
        stored = self._steps_at(self._by_age(self.ends[0])[-most:])
        return np.array([*self._forgotten, *stored][-most:], dtype=self.stored_dtype)

    def _most_steps(self, most: int) -> int:
        return max(_FEWEST_STEPS, min(most, 8 * _DECISION_BYTES // self._step_bytes))

    def _steps_at(self, slots: Indices) -> npt.NDArray[Any]:
        """The observations of all environments in ``slots``."""
        where, envs = np.repeat(slots, self.n_envs), np.tile(self._all_lanes, len(slots))
        out = np.empty((len(where), *self.shape), dtype=self.stored_dtype)
        self._read_with_gaps(envs, self.ends[0][where, envs].astype(np.int64)[None] - self.layout.stack, [out])
        return out.reshape(len(slots), self.n_envs, *self.shape)

    @property
    def _step_bytes(self) -> int:
        return self.n_envs * math.prod(self.shape) * self.stored_dtype.itemsize

    def _start(self) -> None:
        config = self.config
        layout = StackLayout(self.shape, self.stored_dtype)
        if isinstance(config.frame_stack, int):
            layout = declared_layout(self.shape, self.stored_dtype, config.frame_stack)
        if config.recipe is not None and self._has_elements:
            # Mistakes in it are to be seen now, not after the first steps.
            config.recipe.build(self._likely_frame(layout))
        may_be_stack = config.frame_stack == "auto" and max(self.shape, default=1) > 1
        if not self._has_elements:
            self._reconsider_at = None
            self.use(StackLayout((1,), self.stored_dtype), _AS_THEY_ARE)  # nothing will ever be in there
            return
        if config.recipe is not None and not may_be_stack:
            self.use(layout, config.recipe)
            return
        enough = max(_FEWEST_STEPS, min(_DECISION_STEPS, _DECISION_BYTES // self._step_bytes))
        # Steps of short rollouts are remembered until there are enough of them to choose a codec by.
        self._decide_at = min(enough, self.n_slots if config.recipe else max(self.n_slots, _FEWEST_STEPS))
        self.use(layout, _AS_THEY_ARE)

    def _likely_frame(self, layout: StackLayout) -> FrameSpec:
        """The frame of a layout that is not known yet: it may turn out to be a stack of RGB images."""
        may_be_rgb = self.config.frame_stack == "auto" and any(
            size % RGB == 0 for size in (*self.shape[:1], *self.shape[-1:])
        )
        return replace(layout.frame, channels=RGB) if may_be_rgb else layout.frame
