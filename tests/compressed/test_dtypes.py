"""Choosing dtypes."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.compressed import dtypes, find_buffer_dtypes, find_smallest_dtype, init_jit
from sb3_extra_buffers.errors import MissingPackageError, UnknownMethodError


@pytest.mark.parametrize(
    ("max_val", "signed", "expected"),
    [
        (0, False, np.uint8),
        (255, False, np.uint8),
        (256, False, np.uint16),
        (65_535, False, np.uint16),
        (65_536, False, np.uint32),
        (2**32, False, np.uint64),
        (2**64 - 1, False, np.uint64),
        (2**64, False, np.float32),
        (127, True, np.int8),
        (128, True, np.int16),
        (-128, True, np.int8),
        (-129, True, np.int16),
        (2**63 - 1, True, np.int64),
        (2**63, True, np.float32),
        (-1, False, np.int8),
        (255.0, False, np.uint8),
        (0.5, False, np.float32),
        (np.inf, False, np.float32),
        (np.nan, False, np.float32),
        (np.uint8(200), False, np.uint8),
    ],
)
def test_smallest_dtype(max_val: float, signed: bool, expected: type) -> None:
    assert find_smallest_dtype(max_val, signed=signed) == expected


def test_fallback_of_the_smallest_dtype() -> None:
    assert find_smallest_dtype(2**70, fallback=np.float64) == np.float64


@pytest.mark.parametrize(
    ("shape", "runs_type"),
    [(4, np.uint8), ((5, 51), np.uint8), ((16, 16), np.uint16), ((84, 84), np.uint16), ((4, 84, 84), np.uint16),
     ((3, 240, 320), np.uint32), ([2, 3], np.uint8), ((), np.uint8), (np.int64(300), np.uint16)],
)  # fmt: skip
def test_runs_cannot_overflow(shape: object, runs_type: type) -> None:
    assert find_buffer_dtypes(shape) == {"elem_type": np.dtype(np.uint8), "runs_type": np.dtype(runs_type)}


def test_element_dtype_is_passed_on() -> None:
    assert find_buffer_dtypes((3,), elem_dtype=np.float32, compression_method="rle")["elem_type"] == np.float32


def test_jit_methods_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(dtypes, "init_jit", lambda *types: compiled.append(types))
    find_buffer_dtypes((84, 84), np.float32, "rle-jit")
    find_buffer_dtypes((84, 84), np.uint8, "zstd-5")
    find_buffer_dtypes((84, 84))
    assert compiled == [(np.dtype(np.float32), np.dtype(np.uint16))]


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(UnknownMethodError, match="'zip'"):
        find_buffer_dtypes((84, 84), compression_method="zip")


@pytest.mark.skipif(not has_numba(), reason="needs numba")
def test_init_jit_compiles() -> None:
    init_jit()
    init_jit(elem_type=np.float32, runs_type=np.uint32)


def test_init_jit_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(MissingPackageError, match=r"init_jit.*sb3-extra-buffers\[numba\]"):
        init_jit()
    with pytest.raises(MissingPackageError, match=r"sb3-extra-buffers\[numba\]"):
        find_buffer_dtypes((84, 84), compression_method="rle-jit")
