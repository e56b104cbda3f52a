"""The store of a buffer's observations: what SB3's arrays are in SB3's buffers.

It also decides how observations are stored: how they are cut into frames and, with ``auto``, by which codec.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.errors import CorruptDataError, ObservationError
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.arena import Arena
from sb3_extra_buffers.storage.choice import choose_codec
from sb3_extra_buffers.storage.config import CodecRecipe, StorageConfig, cast, saturate
from sb3_extra_buffers.storage.digests import Digests, ObservationDigests, digests_of
from sb3_extra_buffers.storage.gathering import gather_observations
from sb3_extra_buffers.storage.locking import BufferLock
from sb3_extra_buffers.storage.observation_index import EarlierCodec, MakeZeros, ObservationIndex
from sb3_extra_buffers.storage.outputs import OutputPool
from sb3_extra_buffers.storage.pickling import Pickled, arguments_of, unpickled, upgraded_attributes
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
    """The observations of one space (of one key in a Dict space), in one or more columns.

    A replay buffer has two columns, observations and next observations, that share their frames. A slot that was never
    written reads as zeros, as in SB3.

    An observation is written in three parts: :meth:`prepare` does all that can fail, :meth:`append` stores its frames,
    and :meth:`place` puts it into a slot. Whatever happens in between, stored observations stay readable.

    The first decision how to store observations falls after a few dozen steps. Until then they are not compressed.
    ``auto`` checks it soon after, and whenever the size of compressed frames has changed.

    :param as_float: Return float32, whatever the space's dtype.
    :param divisor: What observations are divided by when they are read.
    :param verify: Keep a checksum of every observation, and compare it when the observation is read.
    :param lock: What threads must hold to change or read the store; by default its own.
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
        make_zeros: MakeZeros = np.zeros,
        verify: bool = False,
        lock: BufferLock | None = None,
    ) -> None:
        super().__init__(n_slots, n_envs, shape, config.stored_dtype(dtype), n_columns, make_arena, make_zeros)
        self.dtype = dtype
        self.config = config
        self.outputs = outputs or OutputPool()
        self.output_dtype = np.dtype(np.float32) if as_float else dtype
        self.divisor = divisor
        self.lock = lock or BufferLock()
        self.digests = ObservationDigests(n_columns, n_slots, n_envs, make_zeros) if verify else None
        self._has_elements = math.prod(shape) > 0
        self._all_lanes = np.arange(n_envs)
        self._step_shape = (n_envs, *shape)
        self._steps = 0
        self._decide_at: int | None = None
        """The step of the first decision; ``None`` once it has been made."""
        self._recheck_at: int | None = _RECHECK_STEP if config.recipe is None else None
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

    def checked(self, observations: npt.ArrayLike, n: int | None = None) -> npt.NDArray[Any]:
        """Observations for ``n`` (by default all) environments, ready to be written, or an error."""
        array = np.asarray(observations)
        if n is None and array.shape == self._step_shape:
            pass  # as it nearly always is
        elif array.shape != ((n := n or self.n_envs), *self.shape):
            # As in SB3, a single environment may leave out its axis, and numbers may have any.
            is_single = n == 1 and array.shape == self.shape
            if not is_single and (array.size != n or math.prod(self.shape) != 1):
                raise ObservationError(
                    f"Expected observations of shape {(n, *self.shape)}, one for each of {n} environments, "
                    f"but got {array.shape}. Is the buffer's observation space that of the environment?"
                )
            array = array.reshape(n, *self.shape)
        if array.dtype != self.dtype:
            array = cast(array, self.dtype)
        if not array.flags.writeable:  # numba would compile its kernels again for it
            array = array.copy(order="K")
        return array if array.dtype is self.stored_dtype else saturate(array, self.stored_dtype)

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
        may_decide = self._decide_at is not None or self._recheck_at is not None
        if may_decide and slot is not None and self._is_collecting_steps and self.ends[0][slot].all():
            self._save_steps([slot])
        if self._has_elements:
            self.frames.make_room(n_observations, self._oldest)

    def append(self, observations: Sequence[npt.NDArray[Any]], lanes: Indices | None = None) -> Appended:
        """Store the frames of one or two :meth:`checked` observations of all environments, for :meth:`place`."""
        digests = None if self.digests is None else [digests_of(part) for part in observations]
        if not self._has_elements:
            return [0] * len(observations), digests
        where = self._all_lanes if lanes is None else lanes
        if len(observations) == 2:
            return self.frames.append_pairs(where, observations, self._oldest), digests
        return [self.frames.append(where, observations[0], self._oldest)], digests

    def place(self, places: Sequence[tuple[int, int]], appended: Appended, lanes: Indices | None = None) -> None:
        """Put appended observations into columns and slots. Doing it twice does no harm."""
        ends, digests = appended
        for i, (column, slot) in enumerate(places):
            where = slot if lanes is None else (slot, lanes)
            if slot >= self.slots_used:  # first: frames of slots that are not in use are released
                self.slots_used = slot + 1
            self.ends[column][where] = ends[i]
            if self.digests is not None and digests is not None:
                self.digests.columns[column][where] = digests[i]

    def finish_step(self) -> None:
        """To be called when a step is complete: decides, once in a while, how to go on."""
        self._steps += 1
        # Not only at the planned step: a decision that was interrupted then is made now.
        if self._decide_at is not None and self._steps >= self._decide_at:
            self.decide()
        if self._steps % REVIEW_STEPS == 0 or self._recheck_is_due:
            self._review()
        if self.frames.arena.nbytes > self._compact_at:
            self.compact()

    def read(self, wanted: list[tuple[int, Indices]], envs: Indices, device: th.device = CPU) -> list[npt.NDArray[Any]]:
        """The observations at ``(slots[i], envs[i])``, for each column and its slots in ``wanted``, as fresh arrays."""
        outs = self.read_stored(wanted, envs, device)
        if self.stored_dtype != self.output_dtype:
            outs = [out.astype(self.dtype).astype(self.output_dtype) for out in outs]
        return outs if self.divisor == 1.0 else [out / np.float32(self.divisor) for out in outs]

    def read_stored(
        self, wanted: list[tuple[int, Indices]], envs: Indices, device: th.device
    ) -> list[npt.NDArray[Any]]:
        """The same in the dtype that they are stored in, before any normalization."""
        if envs.dtype != np.int64:  # as NumPy 1 draws them on Windows
            envs = envs.astype(np.int64)
        with self.lock.held:
            outs = [self.outputs.take((len(envs), *self.shape), self.stored_dtype, device) for _ in wanted]
            firsts = self._firsts(wanted, envs)
            if firsts.min(initial=0) < 0:
                self._read_with_gaps(envs, firsts, outs)
            elif len(envs):
                gather_observations(self.frame_stores, self.layout, envs, firsts, outs)
            if self.digests is not None:
                for (column, slots), out in zip(wanted, outs, strict=True):
                    self.digests.compare(column, slots, envs, out)
        return outs

    def clear(self) -> None:
        """Remove all observations. The codec keeps what it has learnt from them."""
        with self.lock.held:
            if self._is_collecting_steps:
                self._save_steps(self._by_age(self.ends[0]))
            for ends in self.ends:
                ends[: self.slots_used] = 0
            if self.digests is not None:
                self.digests.clear(self.slots_used)
            self._earlier = []
            self.frames.clear()

    def check(self) -> None:
        """Raise :class:`~sb3_extra_buffers.errors.CorruptDataError` if anything here contradicts something else."""
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
        stored = self._steps_at(self._by_age(self.ends[0])[-most:])
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
        """Read what :meth:`state` returned, in a store that was made with the same arguments."""
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

    def __getstate__(self) -> dict[str, Any]:
        return {"arguments": arguments_of(self), "state": Pickled(self.lock.held, self.state)}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        if "state" not in pickled:
            vars(self).update(upgraded_attributes(pickled))
            pickled = {"arguments": arguments_of(self), "state": self.state()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning was shown when the store was created
            ObservationStore.__init__(self, **pickled["arguments"])
        self.restore(unpickled(pickled["state"]))

    def _restore_digests(self, state: SavedState) -> None:
        # Observations that were saved without checksums are not verified.
        if self.digests is not None and state.has("digests") and state.part("digests").array_names():
            self._restore_columns(state.part("digests"), self.digests.columns)

    def _restore_columns(self, state: SavedState, columns: list[npt.NDArray[Any]]) -> None:
        for column, fresh in enumerate(columns):
            saved = state.array(str(column), fresh.dtype, fresh.shape)
            if self._make_zeros is np.zeros:
                columns[column] = saved
            else:
                fresh[:] = saved
