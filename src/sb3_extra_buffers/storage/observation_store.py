"""Observations by place: which frames of which lane make up the observation in slot ``t`` of environment ``e``."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Codec, FrameSpec, Indices
from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.errors import ObservationError
from sb3_extra_buffers.persistence.plain import decode, encode
from sb3_extra_buffers.storage.arena import Arena
from sb3_extra_buffers.storage.choice import choose_codec
from sb3_extra_buffers.storage.config import CodecRecipe, StorageConfig, saturate
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.memory import zeros
from sb3_extra_buffers.storage.outputs import OutputPool
from sb3_extra_buffers.storage.stacking import MAX_STACK, RGB, StackLayout, declared_layout, detect_layout

if TYPE_CHECKING:
    from sb3_extra_buffers.persistence.state import SavedState, State

logger = logging.getLogger("sb3_extra_buffers")

_LOOK_AT_STEPS = 64
_DELTA_SERVES_AT_FIRST = 1 / 4
_LOOK_AGAIN_AT = 512
_LOOK_AGAIN_AT_STEPS = 192
"""The first steps of an episode are often all alike, so what was chosen by them is looked at once more."""
_LOOK_AT_BYTES = 4 << 20
_FEWEST_STEPS = 34  # two chains of 16 frames and the start of a third
_REVIEW_STEPS = 2048
_LAST_FRAME_NUMBER = (1 << 32) - (1 << 20)
"""Close to what an index entry can hold, with room for the frames that arrive between two reviews."""
_WORTH_COMPACTING = 1 << 20
_PIECE = 4096
_AS_THEY_ARE = CodecRecipe(parse_method("none"))
CPU = th.device("cpu")


class ObservationStore:
    """Observations of one space (of one key in a Dict space), ``n_slots`` × ``n_envs`` of them, in one or more
    *columns*.

    A replay buffer has two columns, observations and next observations, that share their frames. A slot that was never
    written reads as zeros, as in SB3.

    How observations are cut into frames, and with ``auto`` also the codec, is decided after a few dozen steps.
    Until then they are kept as they are.
    """

    def __init__(
        self,
        n_slots: int,
        n_envs: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        config: StorageConfig,
        n_columns: int = 1,
        outputs: OutputPool | None = None,
        as_float: bool = False,
        divisor: float = 1.0,
        make_arena: Callable[[], Arena] = Arena,
        make_zeros: Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]] = np.zeros,
    ) -> None:
        self.n_slots = n_slots
        self.n_envs = n_envs
        self.shape = shape
        self.dtype = dtype
        self.config = config
        self.outputs = outputs or OutputPool()
        self.output_dtype = np.dtype(np.float32) if as_float else dtype
        self.divisor = divisor
        self._make_arena = make_arena
        self._make_zeros = make_zeros
        self.stored_dtype = config.stored_dtype(dtype)
        self.ends = [make_zeros((n_slots, n_envs), np.dtype(np.uint32)) for _ in range(n_columns)]
        """The number of the frame after an observation's last one; 0 where there is none."""
        self._slots_used = 0
        """Slots from this one on have never been written to, so nobody has to look at them."""
        self._all_lanes = np.arange(n_envs)
        self._steps = 0
        self._decide_at: int | None = None
        self._usual_frame_bytes: float | None = None
        self._compact_at = _WORTH_COMPACTING
        """The size of the arena at which to look whether most of it is dead."""
        self._start()

    @property
    def codec(self) -> Codec:
        return self.frames.codec

    @property
    def label(self) -> str:
        """The method in use, for people."""
        if self._decide_at is not None:
            return f"{self.config.recipe.method if self.config.recipe else 'auto'} (not enough seen yet)"
        return self.codec.label if self.config.recipe else f"{self.codec.label} (auto)"

    def checked(self, observations: npt.ArrayLike, n: int | None = None) -> npt.NDArray[Any]:
        """Observations for ``n`` (by default all) environments, ready to be written, or an error."""
        n = self.n_envs if n is None else n
        array = np.asarray(observations)
        if array.shape != (n, *self.shape):
            # As in SB3, a single environment may leave out its axis, and numbers may have any.
            is_single = n == 1 and array.shape == self.shape
            if not is_single and (array.size != n or math.prod(self.shape) != 1):
                raise ObservationError(
                    f"Expected observations of shape {(n, *self.shape)}, one for each of {n} environments, "
                    f"but got {array.shape}. Is the buffer's observation space that of the environment?"
                )
            array = array.reshape(n, *self.shape)
        if array.dtype != self.dtype:
            array = self._cast(array)
        if not array.flags.writeable:  # for which compiled code would be compiled again
            array = array.copy(order="K")
        return saturate(array, self.stored_dtype)

    def write(self, column: int, slot: int, observations: npt.NDArray[Any], lanes: Indices | None = None) -> None:
        """Store :meth:`checked` observations, one for each environment or for each of ``lanes``."""
        where = self._all_lanes if lanes is None else lanes
        ends = self.frames.append(where, observations, self._oldest)
        self.ends[column][slot, slice(None) if lanes is None else lanes] = ends
        self._slots_used = max(self._slots_used, slot + 1)
        if column == 0:
            self._steps += 1
            if self._steps == self._decide_at:
                self.decide()
            if self._steps % _REVIEW_STEPS == 0 or self._steps == _LOOK_AGAIN_AT:
                self._review()
        if self.frames.arena.nbytes > self._compact_at:
            self._compact()

    def read(self, wanted: list[tuple[int, Indices]], envs: Indices, device: th.device = CPU) -> list[npt.NDArray[Any]]:
        """The observations at ``(slots[i], envs[i])``, for each column and its slots in ``wanted``, as fresh arrays."""
        outs = [self.outputs.take((len(envs), *self.shape), self.stored_dtype, device) for _ in wanted]
        firsts = self._firsts(wanted, envs)
        if firsts.min(initial=0) < 0:
            self._read_with_gaps(envs, firsts, outs)
        elif len(envs):
            _gather(self.frames, self.layout, envs, firsts, outs)
        if self.stored_dtype != self.output_dtype:
            outs = [out.astype(self.dtype).astype(self.output_dtype) for out in outs]
        return outs if self.divisor == 1.0 else [out / np.float32(self.divisor) for out in outs]

    def clear(self) -> None:
        """Forget all observations; what was learnt about them stays."""
        for ends in self.ends:
            ends[: self._slots_used] = 0
        self.frames.clear()

    def decide(self) -> None:
        """Choose the layout and the codec from the newest observations."""
        self._decide_at = None
        steps = self._recent_steps()
        layout = detect_layout(steps) if self.config.frame_stack == "auto" else self.layout
        recipe = self.config.recipe or choose_codec(layout, steps, delta_serves_at=_DELTA_SERVES_AT_FIRST).recipe
        if recipe.options.get("indexed_colour") and layout.frame.channels != RGB:
            warnings.warn(
                f"Observations of shape {self.shape} are not RGB, so they are stored without indexed_colour. Leave it "
                "out of compression_kwargs.",
                stacklevel=2,
            )
            recipe = recipe.without("indexed_colour")
        self._rebuild(layout, recipe)
        logger.info("%s, frame stack %d, for observations of shape %s", self.codec.label, layout.stack, self.shape)

    def state(self) -> State:
        """For :mod:`sb3_extra_buffers.persistence`."""
        return {
            "layout": {"stack": self.layout.stack, "axis": self.layout.axis},
            "method": str(self._recipe.method),
            "options": encode(self._recipe.options, "compression_kwargs"),
            "steps": self._steps,
            "decide_at": self._decide_at,
            "usual_frame_bytes": self._usual_frame_bytes,
            "compact_at": self._compact_at,
            "ends": {str(column): ends for column, ends in enumerate(self.ends)},
            "frames": self.frames.state(),
        }

    def restore(self, state: SavedState) -> None:
        """Take over what :meth:`state` gave, in a store that was made with the same arguments."""
        self._steps = state.integer("steps")
        self._decide_at = state.integer("decide_at") if state.has("decide_at") else None
        self._usual_frame_bytes = state.number("usual_frame_bytes") if state.has("usual_frame_bytes") else None
        self._compact_at = state.integer("compact_at", _WORTH_COMPACTING)
        recipe = CodecRecipe(parse_method(state.value("method")), decode(state.value("options")))
        self._use(self._restored_layout(state.part("layout")), recipe)
        self.frames.restore(state.part("frames"))
        ends = state.part("ends")
        for column, fresh in enumerate(self.ends):
            saved = ends.array(str(column), np.uint32, fresh.shape)
            if self._make_zeros is np.zeros:
                self.ends[column] = saved
            else:
                fresh[:] = saved
        self._slots_used = self.n_slots
        oldest = self.frames.first_records * self.codec.frames_per_record + self.layout.stack
        for numbers in self.ends:
            for i in range(0, self.n_slots, _PIECE):
                piece = numbers[i : i + _PIECE]
                if not ((piece == 0) | ((piece >= oldest) & (piece <= self.frames.heads))).all():
                    raise state.error("ends", "leads to frames that are not there")

    def _restored_layout(self, state: SavedState) -> StackLayout:
        stack, axis = state.integer("stack", 1, MAX_STACK), state.value("axis")
        if axis not in ("first", "last") or (stack > 1 and self.shape[0 if axis == "first" else -1] % stack):
            raise state.error("stack", f"is {stack} along the {axis!r} axis of observations of shape {self.shape}")
        return StackLayout(self.shape, self.stored_dtype, stack, axis)

    # How observations get in and out

    def _cast(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """To the dtype of the space, as SB3 does it, unless that would make other numbers of them."""
        if np.can_cast(array.dtype, self.dtype, "same_kind"):
            return array.astype(self.dtype)
        if array.dtype.kind in "biuf":
            with np.errstate(invalid="ignore"):
                cast = array.astype(self.dtype)
            if np.array_equal(cast, array):
                return cast
        raise ObservationError(
            f"Observations of dtype {array.dtype} do not fit a space of dtype {self.dtype}: storing them would "
            "change values. Give the observation space the dtype that the environment returns."
        )

    def _firsts(self, wanted: list[tuple[int, Indices]], envs: Indices) -> Indices:
        """The first frame of each observation, (columns, n); below zero where there is none."""
        firsts = np.empty((len(wanted), len(envs)), dtype=np.int64)
        for row, (column, slots) in zip(firsts, wanted, strict=True):
            row[:] = self.ends[column].reshape(-1).take(slots * self.n_envs + envs)  # faster than [slots, envs]
        firsts -= self.layout.stack
        return firsts

    def _read_with_gaps(self, lanes: Indices, firsts: Indices, outs: list[npt.NDArray[Any]]) -> None:
        for first, out in zip(firsts, outs, strict=True):
            written = first >= 0
            out[~written] = 0
            if written.any():
                found = np.empty((int(written.sum()), *self.shape), dtype=self.stored_dtype)
                _gather(self.frames, self.layout, lanes[written], first[written][None], [found])
                out[written] = found

    def _oldest(self) -> Indices:
        """The oldest frame of each lane that an observation still needs."""
        # In pieces: passing arrays as large as the index would leave holes in the process's memory.
        # Less one, so that "never written" becomes the largest number instead of the smallest.
        used = max(self._slots_used, 1)
        pieces = (ends[i : min(i + _PIECE, used)] for ends in self.ends for i in range(0, used, _PIECE))
        oldest_ends = np.stack([(piece - np.uint32(1)).min(axis=0) for piece in pieces]).min(axis=0)
        oldest: Indices = oldest_ends.astype(np.int64) + 1 - self.layout.stack
        return oldest

    def _compact(self) -> None:
        """Store everything anew if most of the arena is dead, as when slots are overwritten in no order.

        Written in turns, as buffers do it, slots free the arena from its old end on, and this finds nothing to do.
        """
        if 2 * float(self._live_frames() @ self.frames.mean_frame_bytes()) < self.frames.arena.live_bytes:
            self._rebuild(self.layout, self._recipe)
        self._compact_at = max(_WORTH_COMPACTING, self.frames.arena.nbytes * 5 // 4)

    def _live_frames(self) -> Indices:
        """How many frames of each lane belong to an observation."""
        counts = np.zeros(self.n_envs, dtype=np.int64)
        sorted_ends, gaps = zeros((2, len(self.ends) * self._slots_used), np.dtype(np.uint32))
        for lane in range(self.n_envs):
            np.concatenate([ends[: self._slots_used, lane] for ends in self.ends], out=sorted_ends)
            sorted_ends.sort()
            # An observation has all its frames for itself, except for those of the one that ends before it.
            gaps[0] = sorted_ends[0]
            np.subtract(sorted_ends[1:], sorted_ends[:-1], out=gaps[1:])
            counts[lane] = np.minimum(gaps, np.uint32(self.layout.stack), out=gaps).sum(dtype=np.int64)
        return counts

    # How it is decided how to store them

    def _review(self) -> None:
        """Look whether what was decided is still right."""
        if self.frames.heads.max() > _LAST_FRAME_NUMBER:
            self._rebuild(self.layout, self._recipe)
        if self.config.recipe is not None or self._decide_at is not None:
            return
        frame_bytes = self.frames.take_mean_frame_bytes()
        usual = self._usual_frame_bytes
        self._usual_frame_bytes = frame_bytes
        drifted = usual is not None and not usual / 2 <= frame_bytes <= usual * 2
        if self._steps != _LOOK_AGAIN_AT and not drifted:
            return
        current = self._recipe if drifted else None
        best = choose_codec(self.layout, self._recent_steps(_LOOK_AGAIN_AT_STEPS), current)
        if best.recipe != self._recipe:
            logger.info("Observations have changed: %s instead of %s", best.recipe.method, self.codec.label)
            self._usual_frame_bytes = None
            self._rebuild(self.layout, best.recipe)

    def _start(self) -> None:
        config = self.config
        layout = StackLayout(self.shape, self.stored_dtype)
        if isinstance(config.frame_stack, int):
            layout = declared_layout(self.shape, self.stored_dtype, config.frame_stack)
        if config.recipe is not None:
            # Mistakes in it are to be seen now, not after the first steps.
            config.recipe.build(self._likely_frame(layout))
        may_be_stack = config.frame_stack == "auto" and max(self.shape, default=1) > 1
        if config.recipe is not None and not may_be_stack:
            self._use(layout, config.recipe)
            return
        step_bytes = max(self.n_envs * layout.frame.nbytes * layout.stack, 1)
        enough = max(_FEWEST_STEPS, min(_LOOK_AT_STEPS, _LOOK_AT_BYTES // step_bytes))
        self._decide_at = min(enough, self.n_slots)
        self._use(layout, _AS_THEY_ARE)

    def _likely_frame(self, layout: StackLayout) -> FrameSpec:
        """The frame of a layout that is not known yet: it may turn out to be a stack of RGB images."""
        may_be_rgb = self.config.frame_stack == "auto" and any(
            size % RGB == 0 for size in (*self.shape[:1], *self.shape[-1:])
        )
        return replace(layout.frame, channels=RGB) if may_be_rgb else layout.frame

    def _use(self, layout: StackLayout, recipe: CodecRecipe) -> None:
        self.layout = layout
        self._recipe = recipe
        self.frames = FrameStore(recipe.build(layout.frame), self.n_envs, layout, self._make_arena())

    def _by_age(self) -> Indices:
        """Slots that hold something, the one written first in front."""
        newest = self.ends[0][: self._slots_used].max(axis=1)
        slots = np.flatnonzero(newest)
        return slots[np.argsort(newest[slots], kind="stable")]

    def _recent_steps(self, most: int = _LOOK_AT_STEPS) -> npt.NDArray[Any]:
        """The newest observations of all environments, ``(steps, n_envs, *shape)``, oldest first."""
        step_bytes = self.n_envs * self.layout.frame.nbytes * self.layout.stack
        slots = self._by_age()[-max(_FEWEST_STEPS, min(most, 8 * _LOOK_AT_BYTES // step_bytes)) :]
        where, envs = np.repeat(slots, self.n_envs), np.tile(self._all_lanes, len(slots))
        out = np.empty((len(where), *self.shape), dtype=self.stored_dtype)
        self._read_with_gaps(envs, self.ends[0][where, envs].astype(np.int64)[None] - self.layout.stack, [out])
        return out.reshape(len(slots), self.n_envs, *self.shape)

    def _rebuild(self, layout: StackLayout, recipe: CodecRecipe) -> None:
        """Store everything anew, in the order in which it came."""
        old_frames, old_layout, old_ends, slots = self.frames, self.layout, self.ends, self._by_age()
        self._use(layout, recipe)
        # Not zeros_like(), which would write to all of it, and so take its memory.
        self.ends = [self._make_zeros(ends.shape, ends.dtype) for ends in old_ends]
        for slot in slots.tolist():
            for column, ends in enumerate(old_ends):
                lanes = np.flatnonzero(ends[slot])
                if len(lanes):
                    found = np.empty((len(lanes), *self.shape), dtype=self.stored_dtype)
                    firsts = ends[slot, lanes].astype(np.int64) - old_layout.stack
                    _gather(old_frames, old_layout, lanes, firsts[None], [found])
                    self.ends[column][slot, lanes] = self.frames.append(lanes, found, self._oldest)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_make_arena": Arena, "_make_zeros": np.zeros}  # a copy is in memory


def _gather(
    store: FrameStore, layout: StackLayout, lanes: Indices, firsts: Indices, outs: list[npt.NDArray[Any]]
) -> None:
    """Fill ``outs`` with the observations that begin at the frames ``firsts``."""
    n = len(lanes)
    if layout.is_contiguous:
        store.gather(lanes, firsts, [out.reshape(n, layout.stack, layout.frame.size).view(np.uint8) for out in outs])
        return
    frames = [np.empty((n, layout.stack, layout.frame.nbytes), dtype=np.uint8) for _ in outs]
    store.gather(lanes, firsts, frames)
    for source, out in zip(frames, outs, strict=True):
        layout.merge(source, out)
