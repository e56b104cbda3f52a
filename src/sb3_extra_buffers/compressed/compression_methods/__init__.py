"""Compression methods for single observations, as version 0.5 had them. The buffers use codecs."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.availability import has_igzip, has_lz4, has_numba, has_zstd
from sb3_extra_buffers.codecs.base import Codec, FrameSpec
from sb3_extra_buffers.codecs.registry import ALIASES, METHODS, create_codec, option_names
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError
from sb3_extra_buffers.storage.config import saturate

HAS_NUMBA, HAS_IGZIP, HAS_ZSTD, HAS_LZ4 = has_numba(), has_igzip(), has_zstd(), has_lz4()

_HEADER = struct.Struct("<4sQ")
_STORABLE = "biufc"
"""The kinds of NumPy dtypes that can be stored."""


@dataclass(frozen=True)
class CompressionMethod:
    """A compression method for single observations. Options are those of its codec, such as ``compresslevel``.

    The bytes start with a header: the dtype in NumPy's notation (4 bytes), and the number of elements (8 bytes). Then
    follows one record of the codec.

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
        """Compress ``arr`` to bytes. If ``elem_type`` is given, convert it first: values out of range saturate."""
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
        """Restore the array given to :meth:`compress`, flat and in the stored dtype.

        ``arr_configs`` can ask for another ``"shape"`` and ``"dtype"``. ``runs_type`` must be the one given to
        :meth:`compress`. ``elem_type`` may be left out; if given, it must be the dtype that was stored.
        """
        configs = dict(arr_configs or {})
        shape, final_dtype = configs.pop("shape", -1), configs.pop("dtype", None)
        if configs:
            raise ConfigurationError(f"arr_configs takes 'shape' and 'dtype', not {', '.join(map(repr, configs))}.")
        stored = np.frombuffer(data, dtype=np.uint8)
        size, dtype = _read_header(stored)
        if elem_type is not None and np.dtype(elem_type) != dtype:
            raise ConfigurationError(f"These bytes hold elements of type {dtype}, not {np.dtype(elem_type)}.")
        try:
            array: npt.NDArray[Any] = np.empty(size, dtype)
        except (MemoryError, ValueError) as error:
            raise CorruptDataError(
                f"The header of these bytes is corrupt: {size} elements of type {dtype} do not fit into memory."
            ) from error
        codec = self._codec(size, dtype, runs_type, options)
        starts, lengths = np.array([[_HEADER.size], [len(stored) - _HEADER.size]], dtype=np.int64)
        codec.decode(stored, starts, lengths, np.zeros_like(starts), array.view(np.uint8).reshape(1, -1))
        array = array.reshape(shape)
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
    if name not in ("delta", "delta-zstd", "zstd-dict")  # their records refer to earlier frames
}
"""Every method for single observations. A method whose package is missing raises an error when it is used."""
