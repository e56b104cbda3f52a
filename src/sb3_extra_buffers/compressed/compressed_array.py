"""An array of compressed observations."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.storage.config import StorageConfig
from sb3_extra_buffers.storage.observation_array import ObservationArray
from sb3_extra_buffers.storage.observation_store import ObservationStore


class CompressedArray(np.ndarray):
    """An array of compressed observations: ``array[3]``, ``array[2:5]``, ``array[slots, envs]``. Reading decodes.

    To NumPy it is an array of objects that takes no memory. Only whole observations can be read and written. To
    compute with all of them, decode them with :meth:`to_numpy`.

    ``buffer``, ``offset``, ``strides`` and ``order`` describe the memory of a ``numpy.ndarray``. This array has none:
    leave them out. The last four arguments are those of
    :class:`~sb3_extra_buffers.compressed.base.BaseCompressedBuffer`.

    :param shape: ``(slots,)`` or ``(slots, envs)``. Consecutive observations of one environment compress best.
    :param dtype: The dtype of an observation.
    :param obs_shape: The shape of an observation.
    """

    _items: ObservationArray | None = None
    # The elements are placeholders: arithmetic on them would be meaningless.
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
            raise ConfigurationError(
                "A CompressedArray has no memory to lay out: leave out buffer, offset and strides."
            )
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
        """Bytes of the compressed observations, their reference frames and their index."""
        store = self._stored.store
        return store.payload_bytes + store.reference_bytes + store.index_bytes(1.0)

    def to_numpy(self) -> npt.NDArray[Any]:
        """Decode all observations into an array of shape ``shape + obs_shape``."""
        return np.asarray(self[:])

    decompress = to_numpy

    def __getitem__(self, key: Any) -> Any:
        return self._stored[self._with_env(key)]

    def __setitem__(self, key: Any, observations: Any) -> None:
        self._stored[self._with_env(key)] = observations

    def __repr__(self) -> str:
        return f"CompressedArray(shape={self.shape}, items={self._items!r})"

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> CompressedArray:
        return self._around(self.shape, copy.deepcopy(self._stored, memo))

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        return self._around, (self.shape, self._stored)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise TypeError(f"{func.__name__} does not work on compressed observations. First decode: array.to_numpy().")

    @property
    def _stored(self) -> ObservationArray:
        if self._items is None:
            raise TypeError("A view has no observations: use the original array, or array.to_numpy().")
        return self._items

    def _with_env(self, key: Any) -> Any:
        """Add environment 0 to ``key`` if the array has no axis for environments: its store always has one."""
        key = slice(None) if key is Ellipsis else key
        if self.ndim == 2:
            return key
        slot, *rest = key if isinstance(key, tuple) else (key,)
        return (slot, 0, *rest)
