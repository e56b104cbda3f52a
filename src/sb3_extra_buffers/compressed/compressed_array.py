"""An array of observations that are stored compressed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.persistence.tree import Pickled, unpickled
from sb3_extra_buffers.storage.config import StorageConfig
from sb3_extra_buffers.storage.observation_array import ObservationArray
from sb3_extra_buffers.storage.observation_store import ObservationStore


class CompressedArray(np.ndarray):
    """Observations by place: ``array[3]``, ``array[2:5]``, ``array[slots, envs]``. What is read is a fresh array.

    To NumPy it is an array of objects that takes no memory of its own. Only items can be read and written; to compute
    with all of them, decode them first, with :meth:`to_numpy`.

    ``buffer``, ``offset``, ``strides`` and ``order`` are arguments of ``numpy.ndarray`` about memory, which there is
    none of. The last four are those of :class:`~sb3_extra_buffers.compressed.base.BaseCompressedBuffer`.

    :param shape: ``(slots,)`` or ``(slots, envs)``. Observations of one environment in a row compress best.
    :param dtype: Of an observation.
    :param obs_shape: Of an observation.
    """

    _items: ObservationArray | None = None
    # Arithmetic on the objects inside would be about nothing.
    __array_ufunc__ = None  # type: ignore[assignment]

    def __new__(
        cls,
        shape: int | tuple[int, ...],
        dtype: npt.DTypeLike,
        obs_shape: int | tuple[int, ...],
        buffer: Any = None,
        offset: int = 0,
        strides: Any = None,
        order: str | None = None,
        dtypes: Mapping[str, Any] | npt.DTypeLike | None = None,
        compression_method: str = "rle",
        compression_kwargs: Mapping[str, Any] | None = None,
        decompression_kwargs: Mapping[str, Any] | None = None,
    ) -> CompressedArray:
        shape, obs_shape = (part if isinstance(part, tuple) else (part,) for part in (shape, obs_shape))
        if len(shape) not in (1, 2) or min(*shape, *obs_shape, 1) < 1:
            raise ConfigurationError(f"shape must be (slots,) or (slots, envs), not {shape} of {obs_shape}.")
        if buffer is not None or offset or strides is not None:
            raise ConfigurationError("There is no memory to lay out: leave out buffer, offset and strides.")
        config = StorageConfig.from_arguments(
            compression_method, dtypes, compression_kwargs, decompression_kwargs, frame_stack=None
        )
        n_slots, n_envs = (*shape, 1)[:2]
        store = ObservationStore(n_slots, n_envs, obs_shape, np.dtype(dtype), config)
        return cls._around(shape, ObservationArray(store))

    @classmethod
    def _around(cls, shape: tuple[int, ...], items: ObservationArray) -> CompressedArray:
        array = np.broadcast_to(np.array(None), shape).view(cls)
        array._items = items
        return array

    @property
    def nbytes(self) -> int:
        """Memory that the compressed observations take, index included."""
        store = self._stored.store
        held = store.frames.arena.nbytes + store.reference_bytes + store.frames.index_bytes
        return held + sum(ends.nbytes for ends in store.ends)

    def to_numpy(self) -> npt.NDArray[Any]:
        """All observations, decoded, as an array of shape ``shape + obs_shape``."""
        return np.asarray(self[:])

    decompress = to_numpy

    def __getitem__(self, key: Any) -> Any:
        return self._stored[self._place(key)]

    def __setitem__(self, key: Any, observations: Any) -> None:
        self._stored[self._place(key)] = observations

    def __repr__(self) -> str:
        return f"CompressedArray(shape={self.shape}, items={self._items!r})"

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> CompressedArray:
        rebuild, arguments = self.__reduce__()
        array: CompressedArray = rebuild(*copy.deepcopy(arguments, memo))
        return array

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        store = self._stored.store
        state = Pickled(store.lock.held, store.state)
        return self._restored, (self.shape, store.shape, store.dtype, store.config, state)

    @classmethod
    def _restored(
        cls,
        shape: tuple[int, ...],
        obs_shape: tuple[int, ...],
        dtype: np.dtype[Any],
        config: StorageConfig,
        state: dict[str, Any],
    ) -> CompressedArray:
        n_slots, n_envs = (*shape, 1)[:2]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # was shown when the array was created
            store = ObservationStore(n_slots, n_envs, obs_shape, dtype, config)
        store.restore(unpickled(state))
        return cls._around(shape, ObservationArray(store))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise TypeError(f"{func.__name__} does not work on compressed observations. First decode: array.to_numpy().")

    @property
    def _stored(self) -> ObservationArray:
        if self._items is None:
            raise TypeError("A view of compressed observations has none: use the array itself, or array.to_numpy().")
        return self._items

    def _place(self, key: Any) -> Any:
        """``key`` with an environment in second place, also where there is only one and so no axis for it."""
        key = slice(None) if key is Ellipsis else key
        if self.ndim == 2:
            return key
        slot, *rest = key if isinstance(key, tuple) else (key,)
        return (slot, 0, *rest)
