"""Compression methods for single observations in tensors, outside any buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.compressed.compatibility import CompressionMethod
from sb3_extra_buffers.gpu_buffers.transfer import upload
from sb3_extra_buffers.gpu_buffers.utils import as_numpy_dtype


@dataclass(frozen=True)
class TensorCompressionMethod:
    """:class:`~sb3_extra_buffers.compressed.compatibility.CompressionMethod` for tensors: the same bytes."""

    name: str

    def compress(
        self,
        arr: th.Tensor | npt.NDArray[Any],
        elem_type: th.dtype | npt.DTypeLike | None = None,
        runs_type: th.dtype | npt.DTypeLike | None = None,
        **options: Any,
    ) -> th.Tensor:
        """``arr`` as bytes, on the device that it is on."""
        array = arr.cpu().numpy() if isinstance(arr, th.Tensor) else arr
        data = CompressionMethod(self.name).compress(
            array, as_numpy_dtype(elem_type), as_numpy_dtype(runs_type), **options
        )
        device = arr.device if isinstance(arr, th.Tensor) else th.device("cpu")
        return upload(np.frombuffer(data, dtype=np.uint8), device)

    def decompress(
        self,
        data: th.Tensor,
        elem_type: th.dtype | npt.DTypeLike | None = None,
        runs_type: th.dtype | npt.DTypeLike | None = None,
        arr_configs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> th.Tensor:
        """The tensor that :meth:`compress` got, on the device that its bytes are on."""
        configs = {name: as_numpy_dtype(value) for name, value in (arr_configs or {}).items()}
        array = CompressionMethod(self.name).decompress(
            data.cpu().numpy().tobytes(), as_numpy_dtype(elem_type), as_numpy_dtype(runs_type), configs, **options
        )
        return upload(array, data.device)


COMPRESSION_METHOD_MAP = {name: TensorCompressionMethod(name) for name in ("none", "rle", "zstd")}
"""Every method of buffers on a device that can stand alone."""
