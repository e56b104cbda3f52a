"""What ``gpu_buffers`` of version 0.5 had besides buffers: dtypes, packed memory, methods for tensors, estimates.

Import its names from the modules of ``gpu_buffers`` that had them: ``metadata``, ``methods``, ``raw_buffer``,
``size_estimation`` and ``utils``. All of these modules are this one.

The estimates say how much memory observations will need, before the first one is stored. They assume that observations
compress as well as those of MsPacman: ``scripts/fit_heap_heuristic.py`` fits curves to measured ratios. The buffers do
not use estimates: they allocate memory as needed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.method import Method
from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.compressed.compression_methods import CompressionMethod
from sb3_extra_buffers.compressed.dtypes import find_buffer_dtypes
from sb3_extra_buffers.compressed.rows import on_host
from sb3_extra_buffers.errors import CapacityError, ConfigurationError

for _name in ("metadata", "methods", "raw_buffer", "size_estimation", "utils"):
    sys.modules[f"sb3_extra_buffers.gpu_buffers.{_name}"] = sys.modules[__name__]


def numpy_dtype_to_torch(dtype: npt.DTypeLike) -> th.dtype:
    """The torch dtype with the same bits."""
    return th.from_numpy(np.empty(0, dtype)).dtype


def torch_dtype_to_numpy(dtype: th.dtype) -> np.dtype[Any]:
    """The NumPy dtype with the same bits."""
    return th.empty(0, dtype=dtype).numpy().dtype


def find_gpu_buffer_dtypes(
    obs_shape: int | Iterable[int], elem_dtype: th.dtype | npt.DTypeLike = th.uint8, compression_method: str = "auto"
) -> dict[str, th.dtype]:
    """The ``dtypes`` argument of a buffer for observations of ``obs_shape`` and ``elem_dtype``, as torch dtypes."""
    found = find_buffer_dtypes(obs_shape, as_numpy_dtypes(elem_dtype), compression_method)
    return {name: numpy_dtype_to_torch(dtype) for name, dtype in found.items()}


def as_numpy_dtypes(dtypes: Any) -> Any:
    """A dtype of torch, or each one in a dict, as NumPy's. Other values are returned unchanged."""
    if isinstance(dtypes, Mapping):
        return {name: as_numpy_dtypes(dtype) for name, dtype in dtypes.items()}
    return torch_dtype_to_numpy(dtypes) if isinstance(dtypes, th.dtype) else dtypes


class RawBuffer:
    """Uninitialised bytes in a ``torch.UntypedStorage``."""

    def __init__(self, size: int, device: th.device | str = "cpu") -> None:
        self.device = th.device(device)
        self.bytes = th.empty(size, dtype=th.uint8, device=device)
        """All bytes as a tensor of ``uint8``."""

    def __len__(self) -> int:
        return self.bytes.shape[0]

    @property
    def storage(self) -> th.UntypedStorage:
        return self.bytes.untyped_storage()

    def resize(self, size: int) -> None:
        """Change the size. The bytes that still fit are kept."""
        old, self.bytes = self.bytes, self.bytes.new_empty(size)
        kept = min(size, len(old))
        self.bytes[:kept] = old[:kept]

    def to(self, device: th.device | str) -> None:
        """Move all bytes to another device."""
        self.bytes, self.device = self.bytes.to(device), th.device(device)


class SharedRawHeap:
    """Cells of any length, back to back in one :class:`RawBuffer`.

    A cell that is written again leaves its old bytes behind as a hole. Holes are closed when room is needed, before the
    heap grows, and by :meth:`compact`. The host knows where each cell is, so no operation waits for the device.

    :param heap_bytes: The largest size of the heap. By default, it grows as needed.
    """

    def __init__(self, n_cells: int, device: th.device | str = "cpu", heap_bytes: int | None = None) -> None:
        if n_cells < 1 or (heap_bytes is not None and heap_bytes < 1):
            raise ConfigurationError(f"A heap needs cells and bytes, not {n_cells} and {heap_bytes}.")
        self.heap_bytes = heap_bytes
        self.raw = RawBuffer(0, device)
        self.start_idx = th.zeros(n_cells, dtype=th.int64)
        """Where each cell starts."""
        self.lengths = th.zeros(n_cells, dtype=th.int64)
        """The bytes in each cell; 0 where nothing was written."""
        self.data_end = 0
        """Where the free bytes at the end begin."""

    @property
    def live_bytes(self) -> int:
        return int(self.lengths.sum())

    def write(self, cell: int, payload: th.Tensor) -> None:
        """Replace the contents of a cell by ``payload``, a tensor of ``uint8`` on any device."""
        size = payload.numel()
        if self.data_end + size > len(self.raw):
            self._make_room(cell, size)
        self.raw.bytes[self.data_end : self.data_end + size].copy_(payload.reshape(-1), non_blocking=True)
        self.start_idx[cell] = self.data_end
        self.lengths[cell] = size
        self.data_end += size

    def read(self, cell: int) -> th.Tensor:
        """A view of the bytes of a cell, valid until the next write."""
        start = int(self.start_idx[cell])
        return self.raw.bytes[start : start + int(self.lengths[cell])]

    def free(self, cell: int) -> None:
        self.lengths[cell] = 0

    def compact(self, size: int | None = None) -> None:
        """Close all holes, and resize the heap to ``size`` bytes; by default, to the bytes in cells."""
        order = self.start_idx.argsort(stable=True)
        starts, lengths = self.start_idx[order], self.lengths[order]
        new_starts = lengths.cumsum(0) - lengths
        self.data_end = self.live_bytes
        kept = (starts - new_starts).repeat_interleave(lengths) + th.arange(self.data_end)
        packed = self.raw.bytes[kept.to(self.raw.device)]
        self.start_idx[order] = new_starts
        self.raw = RawBuffer(max(size or 0, self.data_end), self.raw.device)
        self.raw.bytes[: self.data_end] = packed

    def _make_room(self, cell: int, size: int) -> None:
        """Make room for ``size`` bytes that will replace ``cell``, or raise an error before anything has changed."""
        old_length = int(self.lengths[cell])
        needed = self.live_bytes - old_length + size
        limit = self.heap_bytes
        if limit is not None and needed > limit:
            raise CapacityError(
                f"The heap is full: {size:,} bytes are needed, {limit - (needed - size):,} of heap_bytes={limit:,} are "
                "available. Pass more heap_bytes."
            )
        self.lengths[cell] = 0
        wanted = max(needed, len(self.raw) * 9 // 8)
        self.compact(wanted if limit is None else min(wanted, limit))


class SlotMetadata(NamedTuple):
    """The layout of one ``rle`` record in a heap. Positions are relative to the record's own start, ``byte_start``."""

    byte_start: int
    pos_runs: int
    """Where the run lengths begin."""
    pos_elem: int
    """Where the elements begin, one for each run."""
    run_length: int
    """The number of runs."""
    payload_bytes: int


class TensorCompressionMethod(CompressionMethod):
    """:class:`~sb3_extra_buffers.compressed.compression_methods.CompressionMethod` for tensors: the same bytes.

    Arguments are the same, with dtypes of torch or of NumPy. Results are on the device of the tensor that was given.
    """

    def compress(self, arr: th.Tensor | npt.NDArray[Any], *dtypes: Any, **options: Any) -> th.Tensor:  # type: ignore[override]
        data = super().compress(on_host(arr), *map(as_numpy_dtypes, dtypes), **as_numpy_dtypes(options))
        return th.tensor(
            np.frombuffer(data, dtype=np.uint8), device=arr.device if isinstance(arr, th.Tensor) else "cpu"
        )

    def decompress(self, data: th.Tensor, *dtypes: Any, **options: Any) -> th.Tensor:  # type: ignore[override]
        array = super().decompress(on_host(data).tobytes(), *map(as_numpy_dtypes, dtypes), **as_numpy_dtypes(options))
        return th.tensor(array, device=data.device)


COMPRESSION_METHOD_MAP = {name: TensorCompressionMethod(name) for name in ("none", "rle", "zstd")}
"""Those methods of GPU buffers whose records do not depend on other observations."""

OVERALLOC_FACTOR = 1.5
"""The bytes to reserve, as a multiple of the estimate."""

RATIOS_BY_LEVEL = {
    "zstd": {-100: 0.360, -50: 0.284, -20: 0.168, -5: 0.077, -3: 0.069, -1: 0.061}
    | {1: 0.057, 3: 0.055, 5: 0.052, 10: 0.049, 15: 0.045, 22: 0.044},
    "gzip": {1: 0.096, 3: 0.076},
    "igzip": {0: 0.120, 1: 0.106, 3: 0.076},
    "lz4-frame": {1: 0.109, 5: 0.070, 9: 0.068, 12: 0.067},
    "lz4-block": {1: 0.077, 5: 0.070, 9: 0.067, 16: 0.066},
}
"""Compressed size over raw size of MsPacman observations, stacks of four 84×84 frames."""
MEASURED_RATIOS = {"none": 1.001, "rle": 0.753} | {
    f"{family}/{level}": ratio for family, ratios in RATIOS_BY_LEVEL.items() for level, ratio in ratios.items()
}
"""These ratios by the name of a method, and those of methods without levels."""


@dataclass(frozen=True)
class Curve:
    """The ratio of a family of methods as a polynomial of the level, clipped to the measured levels and ratios."""

    coefficients: tuple[float, ...]
    """Those of the highest power first."""
    levels: tuple[int, int]
    ratios: tuple[float, float]

    def __call__(self, level: int) -> float:
        return float(np.clip(np.polyval(self.coefficients, np.clip(level, *self.levels)), *self.ratios))


# Written by scripts/fit_heap_heuristic.py.
_COEFFICIENTS: dict[str, tuple[float, ...]] = {
    "zstd": (9.4807e-09, 1.89249e-06, 8.84007e-05, -0.00356224, 0.064073),
    "gzip": (-0.01, 0.106),
    "igzip": (-0.000333333, -0.0136667, 0.12),
    "lz4-frame": (-0.000102949, 0.00270049, -0.0227615, 0.129164),
    "lz4-block": (-4.65368e-06, 0.000194805, -0.00277457, 0.0795844),
}
CURVES = {
    family: Curve(_COEFFICIENTS[family], (min(ratios), max(ratios)), (min(ratios.values()), max(ratios.values())))
    for family, ratios in RATIOS_BY_LEVEL.items()
}

_DEFAULT_LEVELS = {"zstd": -3, "gzip": 3, "igzip": 1, "lz4-frame": 1, "lz4-block": 1}
_LIKE = {"rle-jit": "rle", "zstd-dict": "zstd"}
"""Methods that were not measured, and the method whose ratio they get."""
_DELTA_RATIO = 0.1


def estimate_ratio(compression_method: str | Method, level: int | None = None) -> float:
    """Compressed size over raw size. ``level`` overrides that of the method."""
    method = parse_method(str(compression_method))
    name = _LIKE.get(method.name, method.name)
    if name == "delta":
        return _DELTA_RATIO
    if name in CURVES:
        chosen = method.level if level is None else level
        return CURVES[name](_DEFAULT_LEVELS[name] if chosen is None else chosen)
    if name not in MEASURED_RATIOS:
        known = sorted({"none", "rle", "delta", *CURVES, *_LIKE})
        raise ConfigurationError(
            f"There is no estimate for {method.name!r}, only for {', '.join(known)}. Fill a buffer with some of your "
            "observations instead, and look at its memory_usage()."
        )
    return MEASURED_RATIOS[name]


def estimate_max_slot_bytes(
    obs_shape: int | Iterable[int],
    elem_dtype: th.dtype | npt.DTypeLike = th.uint8,
    compression_method: str | Method = "rle",
    overalloc_factor: float = OVERALLOC_FACTOR,
    level: int | None = None,
    *,
    compresslevel: int | None = None,
    runs_type: th.dtype | npt.DTypeLike | None = None,
) -> int:
    """Bytes to reserve for one compressed observation.

    :param compresslevel: Another name of ``level``.
    :param runs_type: Does not change the estimate.
    """
    level = compresslevel if level is None else level
    shape = obs_shape if isinstance(obs_shape, Iterable) else (obs_shape,)
    raw: int = math.prod(int(length) for length in shape) * np.dtype(as_numpy_dtypes(elem_dtype)).itemsize
    return math.ceil(raw * estimate_ratio(compression_method, level) * overalloc_factor)


def estimate_total_heap_bytes(n_cells: int, *args: Any, **kwargs: Any) -> int:
    """Bytes to reserve for ``n_cells`` observations. Further arguments: see :func:`estimate_max_slot_bytes`."""
    return n_cells * estimate_max_slot_bytes(*args, **kwargs)
