"""Compressed frames that can be read like an array."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.storage.observation_array import ObservationArray
from sb3_extra_buffers.storage.observation_store import ObservationStore

_FRAMES_AT_ONCE = 32
"""How many frames are decoded together: one at a time is slow, all at once may take gigabytes."""


class FrameArray(np.lib.mixins.NDArrayOperatorsMixin):
    """Looks like an array of shape ``(n_slots, channels, height, width)``. Reading returns a new array."""

    def __init__(self, store: ObservationStore) -> None:
        self.store = store
        self._frames = ObservationArray(store)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.store.n_slots, *self.store.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.store.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the decompressed frames."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.store.n_slots

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, method={self.store.label!r})"

    def __getitem__(self, key: Any) -> npt.NDArray[Any]:
        key = key if isinstance(key, tuple) else (key,)
        n_new_axes = next((i for i, part in enumerate(key) if part is not None), len(key))
        slots, *rest = _without_ellipsis(key[n_new_axes:], self.ndim)
        if isinstance(slots, list | np.ndarray) and np.ndim(slots) > 1 and np.asarray(slots).dtype == bool:
            raise IndexError("A boolean mask can only select whole frames: it must have one dimension.")
        wanted = np.arange(len(self))[slots]
        if wanted.ndim == 0 or isinstance(slots, slice):
            found = self._read(wanted.reshape(-1))
            first: Any = slice(None) if isinstance(slots, slice) else 0
        else:  # an array of slots may be combined with arrays for other axes: NumPy knows how
            distinct, first = np.unique(wanted, return_inverse=True)
            found, first = self._read(distinct), first.reshape(wanted.shape)
        chosen: npt.NDArray[Any] = found[(first, *rest)]
        return chosen[(np.newaxis,) * n_new_axes] if n_new_axes else chosen

    def __setitem__(self, key: Any, frames: npt.ArrayLike) -> None:
        key = key if isinstance(key, tuple) else (key,)
        slots, *rest = _without_ellipsis(key, self.ndim)
        if any(not isinstance(part, slice) or part != slice(None) for part in rest):
            raise IndexError("Frames are stored whole: assign to a slot, not to a part of a frame.")
        self._frames[slots, 0] = frames

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return self.in_order(np.arange(len(self)))

    def in_order(self, slots: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[Any]]:
        """Yield the frames of ``slots``, decoding a few at a time."""
        for start in range(0, len(slots), _FRAMES_AT_ONCE):
            yield from self._read(slots[start : start + _FRAMES_AT_ONCE])

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("Frames are compressed: an array of them cannot be made without a copy.")
        everything = self[:]
        return everything if dtype is None else everything.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        arrays = [np.asarray(part) if isinstance(part, FrameArray) else part for part in inputs]
        return getattr(ufunc, method)(*arrays, **kwargs)

    def _read(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self._frames[slots, np.zeros_like(slots)]
        return found


def _without_ellipsis(key: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """``key`` with its ellipsis replaced by slices, so that its first part selects slots."""
    where = [i for i, part in enumerate(key) if part is Ellipsis]
    if not where:
        return key or (slice(None),)
    given = sum(part is not None for part in key) - 1
    return (*key[: where[0]], *[slice(None)] * (ndim - given), *key[where[0] + 1 :]) or (slice(None),)
