"""Names of sb3-extra-buffers 0.5, kept for older programs. The buffers do not need them.

The older import paths forward to it: ``compressed.compressed_array`` and ``compressed.compression_methods``.
"""

from __future__ import annotations

import copy
import math
import struct
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_obs_shape

from sb3_extra_buffers.codecs.availability import has_igzip, has_lz4, has_numba, has_zstd
from sb3_extra_buffers.codecs.base import Codec, FrameSpec
from sb3_extra_buffers.codecs.registry import ALIASES, METHODS, create_codec, option_names, parse_method
from sb3_extra_buffers.codecs.rle_jit import RleJitCodec
from sb3_extra_buffers.compressed.rows import parts_at
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError, MissingPackageError
from sb3_extra_buffers.storage.config import StorageConfig, saturate
from sb3_extra_buffers.storage.observation_array import ObservationArray
from sb3_extra_buffers.storage.observation_store import ObservationStore

HAS_NUMBA, HAS_IGZIP, HAS_ZSTD, HAS_LZ4 = has_numba(), has_igzip(), has_zstd(), has_lz4()


def find_smallest_dtype(max_val: float, signed: bool = False, fallback: npt.DTypeLike = np.float32) -> np.dtype[Any]:
    """The smallest integer dtype that holds ``max_val``, or ``fallback`` where none does.

    A negative ``max_val`` needs a signed dtype and gets one. A number with a fraction fits into no integer dtype.
    """
    if math.isfinite(max_val) and max_val == int(max_val):
        value = int(max_val)
        dtype = np.min_scalar_type(-value - 1 if signed and value >= 0 else value)
        if dtype.kind in "iu":
            return dtype
    return np.dtype(fallback)


def find_buffer_dtypes(
    obs_shape: int | Iterable[int], elem_dtype: npt.DTypeLike = np.uint8, compression_method: str = "auto"
) -> dict[str, np.dtype[Any]]:
    """The ``dtypes`` argument of a compressed buffer for observations of ``obs_shape`` and ``elem_dtype``.

    ``runs_type`` is wide enough for a run as long as a whole observation. For a ``-jit`` method, the code for these
    dtypes is compiled as well, which should happen before worker processes are forked.
    """
    shape = obs_shape if isinstance(obs_shape, Iterable) else (obs_shape,)
    elem_type = np.dtype(elem_dtype)
    runs_type = find_smallest_dtype(math.prod(int(length) for length in shape))
    if parse_method(compression_method).name.endswith("-jit"):
        init_jit(elem_type, runs_type)
    return {"elem_type": elem_type, "runs_type": runs_type}


def init_jit(elem_type: npt.DTypeLike = np.uint8, runs_type: npt.DTypeLike = np.uint16) -> None:
    """Compile the kernels for observations of ``elem_type`` with runs of ``runs_type`` now.

    Call it before worker processes are forked, so that not all of them compile. Kernels are cached on disk.
    """
    if not has_numba():
        raise MissingPackageError("init_jit", "numba", "numba")
    RleJitCodec(FrameSpec(size=1, dtype=np.dtype(elem_type)), runs_type=runs_type)


class CompressedArray(np.ndarray):
    """An array of compressed observations: ``array[3]``, ``array[2:5]``, ``array[slots, envs]``. Reading decodes.

    To NumPy it is an array of objects that takes no memory. Only whole observations can be read and written. To
    compute with all of them, decode them with :meth:`to_numpy`.

    ``buffer``, ``offset``, ``strides`` and ``order`` are arguments of ``numpy.ndarray`` about memory, which this array
    does not have. The last four are those of :class:`~sb3_extra_buffers.compressed.base.BaseCompressedBuffer`.

    :param shape: ``(slots,)`` or ``(slots, envs)``. Consecutive observations of one environment compress best.
    :param dtype: Of an observation.
    :param obs_shape: Of an observation.
    """

    _items: ObservationArray | None = None
    # Arithmetic on the objects inside would be meaningless.
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
        """Memory of the compressed observations and their index."""
        store = self._stored.store
        return store.payload_bytes + store.reference_bytes + store.index_bytes(1.0)

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

    def _place(self, key: Any) -> Any:
        """``key`` with an environment in second place, also if the array has no axis for it."""
        key = slice(None) if key is Ellipsis else key
        if self.ndim == 2:
            return key
        slot, *rest = key if isinstance(key, tuple) else (key,)
        return (slot, 0, *rest)


class OldAttributes:
    """Attributes that buffers of version 0.5 had."""

    observation_space: Any
    observations: Any
    next_observations: Any

    @property
    def dtypes(self) -> dict[str, Any]:
        """``elem_type`` and ``runs_type``; of each key in a Dict space."""
        return self._for_space("dtypes", "find_buffer_dtypes()", lambda shape, dtype: find_buffer_dtypes(shape, dtype))

    @property
    def flatten_config(self) -> dict[str, Any]:
        """The number of elements of an observation, and their dtype."""
        return self._for_space(
            "flatten_config",
            "buffer.observation_space",
            lambda shape, dtype: {"shape": math.prod(shape), "dtype": dtype},
        )

    def reconstruct_obs(self, idx: int, env_idx: int | None = None) -> Any:
        """One observation, decoded. A rollout that SB3 has flattened has no ``env_idx``."""
        _warn("reconstruct_obs()", "buffer.observations[idx, env_idx]")
        return parts_at(self.observations, idx if env_idx is None else (idx, env_idx))

    def reconstruct_nextobs(self, idx: int, env_idx: int) -> Any:
        _warn("reconstruct_nextobs()", "buffer.next_observations[idx, env_idx]")
        return parts_at(self.next_observations, (idx, env_idx))

    def _for_space(self, name: str, new: str, function: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        _warn(name, new, stacklevel=4)
        space = self.observation_space
        if isinstance(space, spaces.Dict):
            return {key: function(get_obs_shape(part), part.dtype) for key, part in space.spaces.items()}
        return function(get_obs_shape(space), space.dtype)


def _warn(old: str, new: str, stacklevel: int = 3) -> None:
    warnings.warn(f"{old} is deprecated: use {new}.", DeprecationWarning, stacklevel)


_HEADER = struct.Struct("<4sQ")
_STORABLE = "biufc"


@dataclass(frozen=True)
class CompressionMethod:
    """A compression method for single observations. Options are those of its codec, such as ``compresslevel``.

    The bytes start with a header, the dtype in NumPy's notation (4 bytes) and the number of elements (8), followed by
    one record of the codec.

    >>> observation = np.zeros((84, 84), dtype=np.uint8)
    >>> data = COMPRESSION_METHOD_MAP["gzip"].compress(observation, compresslevel=6)
    >>> COMPRESSION_METHOD_MAP["gzip"].decompress(data, arr_configs={"shape": (84, 84)}).shape
    (84, 84)
    """

    name: str

    def compress(
        self,
        arr: npt.NDArray[Any],
        elem_type: npt.DTypeLike | None = None,
        runs_type: npt.DTypeLike | None = None,
        **options: Any,
    ) -> bytes:
        """``arr`` as bytes, first converted to ``elem_type`` if that is given; values outside its range saturate."""
        array = np.ascontiguousarray(arr)
        if elem_type is not None:
            array = saturate(array, np.dtype(elem_type))
        if array.dtype.kind not in _STORABLE or array.size == 0:
            raise ConfigurationError(
                f"Only non-empty arrays of numbers can be compressed, not {array.dtype}{array.shape}."
            )
        codec = self._codec(array.size, array.dtype, runs_type, options)
        record = codec.encode(array.reshape(1, -1).view(np.uint8), np.zeros(1, dtype=np.int64))
        return _HEADER.pack(array.dtype.str.encode(), array.size) + record.data.tobytes()

    def decompress(
        self,
        data: bytes,
        elem_type: npt.DTypeLike | None = None,
        runs_type: npt.DTypeLike | None = None,
        arr_configs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> npt.NDArray[Any]:
        """The array that :meth:`compress` got: flat, or as ``arr_configs`` (``"shape"``, ``"dtype"``) says.

        ``runs_type`` must be the one given to :meth:`compress`. ``elem_type`` may be left out; if given, it must be
        the dtype that was stored.
        """
        configs = dict(arr_configs or {})
        shape, final_dtype = configs.pop("shape", -1), configs.pop("dtype", None)
        if configs:
            raise ConfigurationError(f"arr_configs takes 'shape' and 'dtype', not {', '.join(map(repr, configs))}.")
        stored = np.frombuffer(data, dtype=np.uint8)
        size, dtype = _read_header(stored)
        if elem_type is not None and np.dtype(elem_type) != dtype:
            raise ConfigurationError(f"These bytes hold elements of type {dtype}, not {np.dtype(elem_type)}.")
        codec = self._codec(size, dtype, runs_type, options)
        starts, lengths = np.array([[_HEADER.size], [len(stored) - _HEADER.size]], dtype=np.int64)
        record = np.empty((1, codec.record_bytes), dtype=np.uint8)
        codec.decode(stored, starts, lengths, np.zeros_like(starts), record)
        array: npt.NDArray[Any] = record.reshape(-1).view(dtype).reshape(shape)
        return array if final_dtype is None else array.astype(final_dtype, copy=False)

    def _codec(
        self, size: int, dtype: np.dtype[Any], runs_type: npt.DTypeLike | None, options: dict[str, Any]
    ) -> Codec:
        # Version 0.5 passes runs_type to every method.
        if runs_type is not None and "runs_type" in option_names(self.name):
            options = {**options, "runs_type": runs_type}
        codec = create_codec(self.name, FrameSpec(size, dtype), **options)
        codec.frames_per_record = 1
        return codec


def _read_header(stored: npt.NDArray[np.uint8]) -> tuple[int, np.dtype[Any]]:
    try:
        notation, size = _HEADER.unpack_from(stored.data)
        dtype = np.dtype(notation.rstrip(b"\0").decode())
    except (struct.error, TypeError, ValueError) as error:
        raise CorruptDataError("These bytes do not start like a compressed observation.") from error
    if dtype.kind not in _STORABLE or size == 0:
        raise CorruptDataError(f"The header of these bytes is corrupt: {size} elements of type {dtype}.")
    return size, dtype


COMPRESSION_METHOD_MAP: dict[str, CompressionMethod] = {
    name: CompressionMethod(ALIASES.get(name, name))
    for name in (*METHODS, *ALIASES)
    if name not in ("delta", "zstd-dict")  # their records refer to earlier frames
}
"""Every method for single observations. A method whose package is missing raises an error when it is used."""
