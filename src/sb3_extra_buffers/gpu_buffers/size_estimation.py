"""How much memory compressed observations will take, before any was seen.

An observation is taken to compress as frames of MsPacman do. The ratios were measured on such frames; the curves
between them come from ``scripts/fit_heap_heuristic.py``. The buffers here need no such guess: they take memory as
needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.method import Method
from sb3_extra_buffers.codecs.registry import parse_method

OVERALLOC_FACTOR = 1.5
"""How much more than the estimate is to be reserved."""

MEASURED_RATIOS: dict[str, float] = {
    "none": 1.001,
    "rle": 0.753,
    "zstd-100": 0.360,
    "zstd-50": 0.284,
    "zstd-20": 0.168,
    "zstd-5": 0.077,
    "zstd-3": 0.069,
    "zstd-1": 0.061,
    "zstd1": 0.057,
    "zstd3": 0.055,
    "zstd5": 0.052,
    "zstd10": 0.049,
    "zstd15": 0.045,
    "zstd22": 0.044,
    "gzip1": 0.096,
    "gzip3": 0.076,
    "igzip0": 0.120,
    "igzip1": 0.106,
    "igzip3": 0.076,
    "lz4-frame/1": 0.109,
    "lz4-frame/5": 0.070,
    "lz4-frame/9": 0.068,
    "lz4-frame/12": 0.067,
    "lz4-block/1": 0.077,
    "lz4-block/5": 0.070,
    "lz4-block/9": 0.067,
    "lz4-block/16": 0.066,
}
"""Compressed size over raw size of MsPacman observations, stacks of four 84×84 frames."""


@dataclass(frozen=True)
class Curve:
    """The ratio of a family of methods as a polynomial of the level, within the levels and ratios measured."""

    coefficients: tuple[float, ...]
    """Of the highest power first."""
    levels: tuple[int, int]
    ratios: tuple[float, float]

    def __call__(self, level: int) -> float:
        inside = min(max(level, self.levels[0]), self.levels[1])
        value = 0.0
        for coefficient in self.coefficients:
            value = value * inside + coefficient
        return min(max(value, self.ratios[0]), self.ratios[1])


# Written by scripts/fit_heap_heuristic.py.
CURVES: dict[str, Curve] = {
    "zstd": Curve(
        coefficients=(9.4807e-09, 1.89249e-06, 8.84007e-05, -0.00356224, 0.064073),
        levels=(-100, 22),
        ratios=(0.044, 0.36),
    ),
    "gzip": Curve(coefficients=(-0.01, 0.106), levels=(1, 3), ratios=(0.076, 0.096)),
    "igzip": Curve(coefficients=(-0.000333333, -0.0136667, 0.12), levels=(0, 3), ratios=(0.076, 0.12)),
    "lz4-frame": Curve(
        coefficients=(-0.000102949, 0.00270049, -0.0227615, 0.129164), levels=(1, 12), ratios=(0.067, 0.109)
    ),
    "lz4-block": Curve(
        coefficients=(-4.65368e-06, 0.000194805, -0.00277457, 0.0795844), levels=(1, 16), ratios=(0.066, 0.077)
    ),
}

_DEFAULT_LEVELS = {"zstd": -3, "gzip": 3, "igzip": 1, "lz4-frame": 1, "lz4-block": 1}
_LIKE = {"rle-jit": "rle", "zstd-dict": "zstd"}
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
    return MEASURED_RATIOS[name]


def estimate_max_slot_bytes(
    obs_shape: int | Iterable[int],
    elem_dtype: th.dtype | npt.DTypeLike = th.uint8,
    compression_method: str | Method = "rle",
    overalloc_factor: float = OVERALLOC_FACTOR,
    level: int | None = None,
) -> int:
    """Bytes to reserve for one compressed observation."""
    shape = obs_shape if isinstance(obs_shape, Iterable) else (obs_shape,)
    element_bytes = elem_dtype.itemsize if isinstance(elem_dtype, th.dtype) else np.dtype(elem_dtype).itemsize
    raw = math.prod(int(length) for length in shape) * element_bytes
    return math.ceil(raw * estimate_ratio(compression_method, level) * overalloc_factor)


def estimate_total_heap_bytes(n_cells: int, *args: Any, **kwargs: Any) -> int:
    """Bytes to reserve for ``n_cells`` observations. Further arguments: see :func:`estimate_max_slot_bytes`."""
    return n_cells * estimate_max_slot_bytes(*args, **kwargs)
