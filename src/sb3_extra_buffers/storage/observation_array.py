"""A column of an observation store, which SB3 can index like its own arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.storage.base_store import BaseStore


class ObservationArray:
    """Looks like an array of shape ``(n_slots, n_envs, *shape)``. Reading returns a new array.

    ``shift`` makes slot ``t`` stand for slot ``t + shift``, which is how a buffer with SB3's ``optimize_memory_usage``
    finds the next observation. Where ``is_raw``, observations have the dtype of their space and are not normalized.
    """

    is_raw = False  # for pickles of earlier versions

    def __init__(self, store: BaseStore, column: int = 0, shift: int = 0, is_raw: bool = False) -> None:
        self.store = store
        self.column = column
        self.shift = shift
        self.is_raw = is_raw

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.store.n_slots, self.store.n_envs, *self.store.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.store.dtype if self.is_raw else self.store.output_dtype

    @property
    def raw(self) -> ObservationArray:
        """The same observations in the dtype of their space, before any normalization: as SB3's array has them."""
        return ObservationArray(self.store, self.column, self.shift, is_raw=True)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the decompressed observations."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.store.n_slots

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, method={self.store.label!r})"

    def __getitem__(self, key: Any) -> Any:
        slots, envs, rest = self._locate(key)
        shape = slots.shape
        read = self.store.read_raw if self.is_raw else self.store.read
        (found,) = read([(self.column, slots.reshape(-1))], envs.reshape(-1), self.store.outputs.device)
        found = found if found.shape[:1] == shape else found.reshape((*shape, *self.store.shape))
        return found[(*[slice(None)] * len(shape), *rest)] if rest else found

    def __setitem__(self, key: Any, observations: npt.ArrayLike) -> None:
        if isinstance(key, int | np.integer) and not self.shift:
            if np.shape(observations) != self.shape[1:]:
                with contextlib.suppress(ValueError):  # checked() says what is wrong
                    observations = np.broadcast_to(np.asarray(observations), self.shape[1:])
            self.store.write(self.column, range(len(self))[key], self.store.checked(observations))
            return
        slots, envs, rest = self._locate(key)
        if rest and any(part != slice(None) for part in rest):
            raise IndexError(
                "Observations are stored whole: assign to a slot and an environment, not to a part of one."
            )
        values = np.broadcast_to(np.asarray(observations), (*slots.shape, *self.store.shape))
        values = values.reshape(-1, *self.store.shape)
        checked = [self.store.checked(value[None], 1) for value in values]  # check all before writing any
        for slot, env, value in zip(slots.reshape(-1).tolist(), envs.reshape(-1).tolist(), checked, strict=True):
            self.store.write(self.column, slot, value, np.array([env]))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return as_array(lambda: self[:], dtype, copy)

    def swapaxes(self, first: int, second: int) -> _EnvironmentsFirst:
        """Swap slots and environments, as SB3 does with a rollout before it makes batches."""
        if {first, second} != {0, 1}:
            raise ValueError(f"Only the axes 0 and 1 of observations can be swapped, not {first} and {second}.")
        return _EnvironmentsFirst(self)

    def _locate(self, key: Any) -> tuple[Indices, Indices, tuple[Any, ...]]:
        """Split ``key`` into slots and environments, as two arrays of the same shape, and the rest."""
        key = key if isinstance(key, tuple) else (key,)
        if any(part is Ellipsis or part is None for part in key):
            raise IndexError(f"Observations cannot be indexed with {key!r}: give a slot and an environment.")
        slot_key: Any = key[0]
        env_key: Any = key[1] if len(key) > 1 else slice(None)
        rest = key[2:]
        if len(rest) == 1 and isinstance(rest[0], slice) and rest[0] == slice(None):
            rest = ()  # SB3 adds it to mean "all of it"
        if rest:
            # NumPy combines index arrays and integers, and may then reorder axes. Only keys without that are allowed.
            is_mixed = isinstance(slot_key, slice) and not isinstance(env_key, slice | int | np.integer)
            if not all(isinstance(part, slice if is_mixed else slice | int | np.integer) for part in rest):
                raise IndexError(
                    f"Observations cannot be indexed with {key!r}: read whole ones, observations[slots, envs], and "
                    "index these."
                )
        if all(isinstance(part, np.ndarray) and part.dtype != bool for part in (slot_key, env_key)):
            slots, envs = slot_key, env_key
            if slots.shape != envs.shape:
                slots, envs = _broadcast(slots, envs)
            slots, envs = _non_negative(slots, self.store.n_slots), _non_negative(envs, self.store.n_envs)
        else:
            slots, envs = np.arange(self.store.n_slots)[slot_key], np.arange(self.store.n_envs)[env_key]
            if slots.ndim and envs.ndim and (isinstance(slot_key, slice) or isinstance(env_key, slice)):
                slots = slots.reshape(slots.shape + (1,) * envs.ndim)
            slots, envs = _broadcast(slots, envs)
        if self.shift:
            slots = (slots + self.shift) % self.store.n_slots
        # Compiled code needs contiguous arrays of int64.
        slots, envs = (places.astype(np.int64, order="C", copy=False) for places in (slots, envs))
        return slots, envs, rest


def as_array(
    decode: Callable[[], npt.NDArray[Any]], dtype: npt.DTypeLike | None, copy: bool | None
) -> npt.NDArray[Any]:
    """What ``__array__`` returns for observations that ``decode()`` decodes."""
    if copy is False:
        raise ValueError("Observations are compressed: they cannot be seen as an array without a copy. Allow one.")
    values = decode()
    return values if dtype is None else values.astype(dtype, copy=False)


def _broadcast(slots: npt.NDArray[Any], envs: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Broadcast two arrays, and copy them: numba would compile again for views with strides of zero."""
    try:
        slots, envs = np.broadcast_arrays(slots, envs)
    except ValueError as error:
        raise IndexError(f"Indices of shapes {slots.shape} and {envs.shape} cannot be combined.") from error
    return slots.copy(), envs.copy()


def _non_negative(indices: Indices, size: int) -> Indices:
    """Replace negative indices, which count from the end, by those that count from 0."""
    smallest, largest = (indices.min(), indices.max()) if indices.size else (0, 0)
    if smallest < -size or largest >= size:
        raise IndexError(f"Index out of range: there are {size}, numbered from 0 to {size - 1}.")
    return indices if smallest >= 0 else indices % size


class _EnvironmentsFirst:
    """A rollout's observations with environments as the first axis. They can only be flattened."""

    def __init__(self, array: ObservationArray) -> None:
        self._array = array

    def reshape(self, *shape: int) -> FlatObservations:
        flat = FlatObservations(self._array)
        if tuple(shape) != flat.shape:
            raise ValueError(
                f"Observations can only be flattened over slots and environments, not reshaped to {shape}."
            )
        return flat


class FlatObservations:
    """All observations, environment after environment: ``(n_envs * n_slots, *shape)``.

    As in SB3, scalar observations get an axis of length 1.
    """

    def __init__(self, array: ObservationArray) -> None:
        self._array = array

    @property
    def shape(self) -> tuple[int, ...]:
        n_slots, n_envs, *shape = self._array.shape
        return (n_envs * n_slots, *(shape or (1,)))

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._array.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> npt.NDArray[Any]:
        places = key if isinstance(key, np.ndarray) and key.dtype != bool else np.arange(len(self))[key]
        envs, slots = np.divmod(places, len(self._array))
        found: npt.NDArray[Any] = self._array[slots, envs]
        return found if self._array.store.shape else found[..., None]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return as_array(lambda: self[:], dtype, copy)
