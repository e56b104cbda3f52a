"""Single observations, outside any buffer."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from sb3_extra_buffers.codecs.registry import ALIASES, METHODS, available_methods
from sb3_extra_buffers.compressed import compression_methods
from sb3_extra_buffers.compressed.compression_methods import COMPRESSION_METHOD_MAP
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError, LevelError, MissingPackageError, OptionError
from tests.codecs.helpers import CONTENTS, DTYPES, make_records

USABLE = [name for name in COMPRESSION_METHOD_MAP if ALIASES.get(name, name) in available_methods()]


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype(np.complex64), np.dtype(">f4")], ids=str)
def test_every_method_is_lossless(name: str, dtype: np.dtype) -> None:
    method = COMPRESSION_METHOD_MAP[name]
    for shape in [(1,), (4,), (3, 7, 11), (12, 12)]:
        for content in CONTENTS if dtype in DTYPES else ("noise",):
            array = make_records(content, 1, np.prod(shape) * dtype.itemsize, dtype, seed=1).view(dtype).reshape(shape)
            data = method.compress(array)
            assert type(data) is bytes
            flat = method.decompress(data)
            assert (flat.shape, flat.dtype) == ((array.size,), dtype)
            assert flat.tobytes() == array.tobytes()
            shaped = method.decompress(data, arr_configs={"shape": shape, "dtype": dtype})
            assert (shaped.shape, shaped.dtype) == (shape, dtype)
            assert shaped.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", USABLE)
def test_older_call_shapes(name: str) -> None:
    method = COMPRESSION_METHOD_MAP[name]
    array = np.arange(300, dtype=np.int64).reshape(10, 30) // 50
    data = method.compress(array, elem_type=np.uint8, runs_type=np.uint16)
    configs = {"shape": (10, 30), "dtype": np.float32}
    result = method.decompress(data, elem_type=np.uint8, runs_type=np.uint16, arr_configs=configs)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, array)
    assert configs == {"shape": (10, 30), "dtype": np.float32}


def test_arrays_that_are_not_contiguous() -> None:
    array = np.arange(60, dtype=np.uint8).reshape(6, 10)[::2, ::-1]
    method = COMPRESSION_METHOD_MAP["rle"]
    np.testing.assert_array_equal(method.decompress(method.compress(array), arr_configs={"shape": (3, 10)}), array)


def test_levels_are_options() -> None:
    method = COMPRESSION_METHOD_MAP["gzip"]
    array = np.arange(10_000) // 7
    assert len(method.compress(array, compresslevel=9)) < len(method.compress(array, compresslevel=1))
    with pytest.raises(LevelError):
        method.compress(array, compresslevel=10)
    with pytest.raises(OptionError, match="'level'"):
        method.compress(array, level=1)


def test_values_saturate_in_a_narrower_type() -> None:
    method = COMPRESSION_METHOD_MAP["none"]
    data = method.compress(np.array([-3.0, 2.0, 300.0]), elem_type=np.uint8)
    assert method.decompress(data).tolist() == [0, 2, 255]


def test_wrong_element_type_is_refused() -> None:
    method = COMPRESSION_METHOD_MAP["none"]
    with pytest.raises(ConfigurationError, match=r"float32.*uint8"):
        method.decompress(method.compress(np.ones(3, dtype=np.float32)), elem_type=np.uint8)


def test_unknown_array_configuration_is_refused() -> None:
    method = COMPRESSION_METHOD_MAP["none"]
    with pytest.raises(ConfigurationError, match="'shapes'"):
        method.decompress(method.compress(np.ones(3)), arr_configs={"shapes": (3,)})


@pytest.mark.parametrize("array", [np.zeros(0), np.array(["text"]), np.array([None])], ids=["empty", "text", "objects"])
def test_arrays_without_numbers_are_refused(array: np.ndarray) -> None:
    with pytest.raises(ConfigurationError, match="arrays of numbers"):
        COMPRESSION_METHOD_MAP["none"].compress(array)


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("data", [b"", b"abc", b"no header here", b"|u1\0" + bytes(8), b"|O\0\0" + b"\1" + bytes(7)])
def test_other_bytes_are_corrupt(name: str, data: bytes) -> None:
    with pytest.raises(CorruptDataError):
        COMPRESSION_METHOD_MAP[name].decompress(data)


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("size", [1 << 50, 1 << 62, (1 << 64) - 1])
def test_a_header_that_asks_for_more_than_the_memory_is_corrupt(name: str, size: int) -> None:
    with pytest.raises(CorruptDataError, match=f"{size} elements of type uint8 do not fit into memory"):
        COMPRESSION_METHOD_MAP[name].decompress(b"|u1\0" + size.to_bytes(8, "little") + b"\1" * 20)


def test_methods_that_stand_alone_are_all_there() -> None:
    assert set(COMPRESSION_METHOD_MAP) == {*METHODS, *ALIASES} - {"delta", "delta-zstd", "zstd-dict"}


def test_missing_package_is_named_on_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lz4", None)
    with pytest.raises(MissingPackageError, match=r"sb3-extra-buffers\[lz4\]"):
        COMPRESSION_METHOD_MAP["lz4-block"].compress(np.ones(3))


def test_flags_agree_with_functions() -> None:
    for package in ("numba", "igzip", "zstd", "lz4"):
        flag = getattr(compression_methods, f"HAS_{package.upper()}")
        assert flag is getattr(compression_methods, f"has_{package}")()
