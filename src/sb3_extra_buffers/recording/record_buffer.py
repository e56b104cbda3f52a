"""Circular buffers of frames, rewards, actions and features: with frames, without them, and one that stores nothing."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.errors import ConfigurationError, ObservationError
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.recording import files, video
from sb3_extra_buffers.storage.config import FrameStack, StorageConfig
from sb3_extra_buffers.storage.observation_array import ObservationArray
from sb3_extra_buffers.storage.observation_store import ObservationStore

Self = TypeVar("Self", bound="RecordBuffer")

_FRAMES_AT_ONCE = 32
"""How many frames are decoded together: one at a time is slow, all at once may take gigabytes."""


class Record(NamedTuple):
    """One step: a frame, the action chosen for it, the reward of that action, and features, if any are recorded."""

    frame: npt.NDArray[Any]
    reward: np.generic
    action: Any
    features: Any


class Records(NamedTuple):
    """Many steps, oldest first. ``features`` is ``None`` if none are recorded."""

    frames: npt.NDArray[Any]
    rewards: npt.NDArray[Any]
    actions: npt.NDArray[Any]
    features: npt.NDArray[Any] | None


class FrameArray(ObservationArray):
    """Compressed frames as an array of shape ``(n_slots, channels, height, width)``. Reading returns a new array."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.store.n_slots, *self.store.shape)

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        for start in range(0, len(self), _FRAMES_AT_ONCE):
            yield from self[start : start + _FRAMES_AT_ONCE]

    def _locate(self, key: Any) -> tuple[Indices, Indices, tuple[Any, ...]]:
        slots, *rest = key if isinstance(key, tuple) else (key,)
        if any(not isinstance(part, int | np.integer | slice) for part in rest):
            raise IndexError(f"Frames cannot be indexed with {key!r}: after the slot, use numbers and slices.")
        return super()._locate((slots, 0, *rest))  # there is one environment


class BaseRecordBuffer(ABC):
    """Stores steps, and is a sequence of the steps it holds, oldest first."""

    frames: Any
    """Indexed by slot, like the other arrays: step ``n`` is in slot ``n % max_size``. Unused slots are zero, unless
    :func:`force_alloc_mem` has written another value to those of the other arrays."""
    rewards: npt.NDArray[Any]
    actions: npt.NDArray[Any]
    features: npt.NDArray[Any] | None

    @abstractmethod
    def add(self, frame: Any, reward: Any, action: Any, features: Any = None) -> None:
        """Record a step. A full buffer overwrites the oldest one."""

    @abstractmethod
    def __len__(self) -> int:
        """How many steps the buffer holds."""

    @abstractmethod
    def __getitem__(self, index: int) -> Record:
        """The step at ``index``, counted from the oldest; ``-1`` is the newest."""

    @abstractmethod
    def __iter__(self) -> Iterator[Record]:
        """All steps, oldest first."""


class RecordBuffer(BaseRecordBuffer):
    """Holds the newest ``size`` steps. Frames are compressed without loss.

    Frames may be height × width × channels, channels × height × width or, with one channel, height × width. If a shape
    fits more than one of these, the first applies. Frames are stored channels first.

    :param res: Height and width of frames.
    :param ch_num: Number of channels.
    :param size: How many steps to keep.
    :param dtypes: Dtype of frames (``None``: uint8), of rewards (``None``: float32), then of each feature.
    :param action_shape: Shape of one action; ``()`` for a number.
    :param action_dtype: Dtype of actions.
    :param compression_method: ``"auto"``, or a method such as ``"zstd-5"`` or ``"none"``.
    :param compression_kwargs: Options of the method.
    :param frame_stack: How many frames each frame stacks: ``"auto"`` detects it, ``None`` turns frame sharing off.
    """

    has_frames: ClassVar[bool] = True

    def __init__(
        self,
        res: tuple[int, int] = (240, 320),
        ch_num: int = 3,
        size: int = 40_000,
        dtypes: Sequence[npt.DTypeLike] | None = None,
        *,
        action_shape: tuple[int, ...] = (),
        action_dtype: npt.DTypeLike = np.int64,
        compression_method: str = "auto",
        compression_kwargs: Mapping[str, Any] | None = None,
        frame_stack: FrameStack = "auto",
    ) -> None:
        height, width = res
        if min(height, width, ch_num, size) < 1:
            raise ConfigurationError(f"res, ch_num and size must be at least 1, not {res}, {ch_num} and {size}.")
        defaults = (np.uint8, np.float32)
        given = itertools.zip_longest(dtypes or (), defaults)
        self.dtypes = tuple(np.dtype(default if dtype is None else dtype) for dtype, default in given)
        self.res, self.ch_num, self.max_size = (height, width), ch_num, size
        self._action_shape, self._action_dtype = action_shape, np.dtype(action_dtype)
        self._config = StorageConfig.from_arguments(compression_method, None, compression_kwargs, None, frame_stack)
        self.reset()

    def reset(self) -> None:
        """Remove all steps."""
        size = self.max_size
        self._added = 0
        self.rewards = np.zeros(size, dtype=self.dtypes[1])
        self.actions = np.zeros((size, *self._action_shape), dtype=self._action_dtype)
        fields = [(str(number), dtype) for number, dtype in enumerate(self.dtypes[2:])]
        self.features = np.zeros(size, dtype=fields) if fields else None
        self.frames = self._new_frames((self.ch_num, *self.res))

    def add(self, frame: Any, reward: Any, action: Any, features: Sequence[Any] | None = None) -> None:
        slot = self._added % self.max_size
        checked_reward = _as_item_of(reward, self.rewards, "reward")
        checked_action = _as_item_of(action, self.actions, "action")
        n_features = len(self.dtypes) - 2
        if n_features != (0 if features is None else len(features)):
            raise ObservationError(
                f"This buffer records {n_features} features per step, but got "
                f"{'none' if features is None else len(features)}. Declare a dtype for each, dtypes[2:]."
            )
        checked_features = tuple(
            _as_item_of(feature, self.features[str(number)], f"feature {number}")  # type: ignore[index]  # not None then
            for number, feature in enumerate(() if features is None else features)
        )
        with uninterrupted():  # a step is recorded completely or not at all
            self._write_frame(slot, frame)  # the last call that may fail
            self.rewards[slot] = checked_reward
            self.actions[slot] = checked_action
            if self.features is not None:
                self.features[slot] = checked_features
            self._added += 1

    def __len__(self) -> int:
        return min(self._added, self.max_size)

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """The slots in use, that of the oldest step first."""
        return np.arange(self._added - len(self), self._added) % self.max_size

    def __getitem__(self, index: int) -> Record:
        return self._record(int(self.slots[index]))

    def __iter__(self) -> Iterator[Record]:
        for slot, frame in zip(self.slots.tolist(), self._frames_in_order(), strict=True):
            yield self._record(slot, frame)

    def to_numpy(self) -> Records:
        """All steps as arrays, oldest first. Frames are decompressed, which may take gigabytes."""
        slots = self.slots
        features = None if self.features is None else self.features[slots]
        return Records(self.frames[slots], self.rewards[slots], self.actions[slots], features)

    def save(self, path: str | Path) -> None:
        """Write all steps to a compressed file for :meth:`load`. It contains no pickle."""
        files.save(self, Path(path))

    @classmethod
    def load(cls: type[Self], path: str | Path, size: int | None = None, **kwargs: Any) -> Self:
        """Load a buffer from a file.

        :param size: How many steps the buffer can hold; by default, as many as the saved one.
        :param kwargs: Further arguments, such as ``compression_method``.
        """
        return files.load(cls, Path(path), size, **kwargs)

    def save_video(self, path: str | Path, fps: float = 30.0, lossless: bool = False) -> None:
        """Write all frames to a video, ``.mp4``, ``.mkv`` or ``.gif``. Needs the extra ``video``.

        Floats are shown from 0 to 1, all other numbers from 0 to 255.

        :param lossless: Keep every pixel exactly, in ``.mp4`` or ``.mkv``. Not all players can show such a video.
        """
        if len(self) == 0:
            raise ObservationError("Nothing was recorded. Add steps first.")
        video.save_video(video.to_pictures(self._frames_in_order()), Path(path), fps, lossless)

    @property
    def nbytes(self) -> int:
        """Memory of the steps that the buffer holds now."""
        arrays = (self.rewards, self.actions, self.features)
        return sum(array.nbytes for array in arrays if array is not None) + self._frames_nbytes()

    def __repr__(self) -> str:
        shape = "×".join(map(str, (self.ch_num, *self.res)))
        frames = f"frames {shape} {self.dtypes[0]}" if self.has_frames else "no frames"
        return f"{type(self).__name__}({len(self):,} of {self.max_size:,} steps, {frames})"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a frame of this shape can be recorded."""
        height, width = self.res
        shapes = [(height, width, self.ch_num), (self.ch_num, height, width)]
        return shape in (shapes if self.ch_num > 1 else [*shapes, (height, width)])

    # Frames: FramelessRecordBuffer overrides these

    def _new_frames(self, shape: tuple[int, ...]) -> Any:
        return FrameArray(ObservationStore(self.max_size, 1, shape, self.dtypes[0], self._config))

    def _write_frame(self, slot: int, frame: Any) -> None:
        array = np.asarray(frame)
        stored_shape = (self.ch_num, *self.res)
        if not self.fits(array.shape):
            raise ObservationError(
                f"Expected a frame of shape {(*self.res, self.ch_num)} or {stored_shape}"
                f"{f' or {self.res}' if self.ch_num == 1 else ''}, but got {array.shape}."
            )
        if array.shape == (*self.res, self.ch_num):
            array = array.transpose(2, 0, 1)
        array = _exactly(array.reshape(stored_shape), self.dtypes[0], "Frames")
        self.frames.store.write(0, slot, array[np.newaxis])

    def _frames_nbytes(self) -> int:
        store: ObservationStore = self.frames.store
        return store.payload_bytes + store.reference_bytes + store.index_bytes(1.0)

    def _frames_in_order(self) -> Iterator[npt.NDArray[Any]]:
        slots = self.slots
        for start in range(0, len(slots), _FRAMES_AT_ONCE):
            yield from self.frames[slots[start : start + _FRAMES_AT_ONCE]]

    def _record(self, slot: int, frame: npt.NDArray[Any] | None = None) -> Record:
        features = None if self.features is None else self.features[slot].copy()
        frame = self.frames[slot] if frame is None else frame
        return Record(frame, self.rewards[slot], np.copy(self.actions[slot])[()], features)


class FramelessRecordBuffer(RecordBuffer):
    """A :class:`RecordBuffer` that drops frames. Its ``frames`` are zeros that take no memory."""

    has_frames = False

    def _new_frames(self, shape: tuple[int, ...]) -> Any:
        return np.broadcast_to(np.zeros((), dtype=self.dtypes[0]), (self.max_size, *shape))

    def _write_frame(self, slot: int, frame: Any) -> None:
        pass

    def _frames_nbytes(self) -> int:
        return 0


class DummyRecordBuffer(BaseRecordBuffer):
    """Accepts everything and stores nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.frames = np.zeros((0, 0, 0, 0), dtype=np.uint8)
        self.rewards = np.zeros(0, dtype=np.float32)
        self.actions = np.zeros(0, dtype=np.int64)
        self.features = None

    def add(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Record:
        raise IndexError(f"There is no step {index}: this buffer stores nothing.")

    def __iter__(self) -> Iterator[Record]:
        return iter(())


def _as_item_of(value: Any, array: npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
    """``value`` in the shape and dtype of one item of ``array``. Only floats may be rounded."""
    given = np.asarray(value)
    shape = array.shape[1:]
    if given.size != math.prod(shape):
        raise ObservationError(f"Expected one {what} of shape {shape}, but got {given.shape}.")
    given = given.reshape(shape)
    if array.dtype.kind == "f" and given.dtype.kind in "biuf":
        return given.astype(array.dtype)
    return _exactly(given, array.dtype, f"The {what}")


def _exactly(array: npt.NDArray[Any], dtype: np.dtype[Any], what: str) -> npt.NDArray[Any]:
    """``array`` as ``dtype``, or an error if that changes a value."""
    if array.dtype == dtype:
        return array
    with np.errstate(invalid="ignore", over="ignore"):
        cast = array.astype(dtype)
    if not np.array_equal(cast, array, equal_nan=array.dtype.kind in "fc"):
        raise ObservationError(f"{what} of dtype {array.dtype} would change in an array of dtype {dtype}.")
    return cast
