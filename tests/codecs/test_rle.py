"""Run-length encoding: the compiled codec against the one that defines the bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.codecs.base import FrameSpec
from sb3_extra_buffers.codecs.registry import create_codec
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError
from tests.codecs.helpers import CONTENTS, frame_specs, make_records, store

needs_numba = pytest.mark.skipif(not has_numba(), reason="needs numba")
both = pytest.mark.parametrize("method", ["rle", pytest.param("rle-jit", marks=needs_numba)])
LANES = np.arange(3)


@needs_numba
@settings(max_examples=100)
@given(
    frame=frame_specs(),
    content=st.sampled_from(CONTENTS),
    runs_type=st.sampled_from([None, np.uint8, np.uint16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_compiled_bytes_are_the_same(frame: FrameSpec, content: str, runs_type: type | None, seed: int) -> None:
    records = make_records(content, 3, frame.nbytes, frame.dtype, seed)
    reference = create_codec("rle", frame, runs_type=runs_type)
    compiled = create_codec("rle-jit", frame, runs_type=runs_type)
    expected = reference.encode(records, LANES)
    actual = compiled.encode(records, LANES)
    for left, right in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(left, right)
    np.testing.assert_array_equal(store(reference, [records], LANES).decode(compiled), records)


@both
@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_runs_longer_than_their_type_are_split(method: str, dtype: type) -> None:
    frame = FrameSpec(300 * 300, np.dtype(dtype))
    codec = create_codec(method, frame, runs_type=np.uint8)
    image = np.full((1, 300 * 300), 7, dtype=dtype)
    image[0, 5000:5255] = 9  # exactly the longest run
    records = image.view(np.uint8)
    stored = store(codec, [records], np.zeros(1, dtype=np.int64))
    n_runs = -(-5000 // 255) + 1 + -(-(90_000 - 5255) // 255)
    assert stored.lengths.tolist() == [n_runs * (1 + frame.dtype.itemsize)]
    np.testing.assert_array_equal(stored.decode(codec), records)


@both
def test_layout_is_runs_then_elements(method: str) -> None:
    codec = create_codec(method, FrameSpec(300, np.dtype(np.uint8)))
    record = np.repeat(np.array([5, 6], dtype=np.uint8), [256, 44])[None]
    assert codec.encode(record, np.zeros(1, dtype=np.int64)).data.tolist() == [0, 1, 44, 0, 5, 6]


@both
@pytest.mark.parametrize(("size", "width"), [(255, 1), (256, 2), (65_535, 2), (65_536, 4)])
def test_default_run_type_holds_a_whole_frame(method: str, size: int, width: int) -> None:
    codec = create_codec(method, FrameSpec(size, np.dtype(np.uint8)))
    encoded = codec.encode(np.zeros((1, size), dtype=np.uint8), np.zeros(1, dtype=np.int64))
    assert encoded.lengths.tolist() == [width + 1]


@both
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128, np.float16])
def test_other_element_sizes(method: str, dtype: type) -> None:
    frame = FrameSpec(100, np.dtype(dtype))
    codec = create_codec(method, frame)
    records = np.repeat(np.arange(4, dtype=dtype), 25)[None].view(np.uint8)
    stored = store(codec, [records], np.zeros(1, dtype=np.int64))
    np.testing.assert_array_equal(stored.decode(codec), records)


@both
@pytest.mark.parametrize("runs_type", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize(
    "runs",
    [[0], [9], [11], [5, 6], [-1, 11], [-1, -1, 12], [5, -1, 5, 1]],
    ids=str,
)
def test_runs_that_do_not_add_up(method: str, runs_type: type, runs: list[int]) -> None:
    """Also where their sum wraps around to the right number."""
    codec = create_codec(method, FrameSpec(10, np.dtype(np.uint64)), runs_type=runs_type)
    payload = np.array(runs).astype(runs_type).tobytes() + np.arange(len(runs), dtype=np.uint64).tobytes()
    data = np.frombuffer(payload, dtype=np.uint8)
    out = np.zeros((1, 80), dtype=np.uint8)
    zero = np.zeros(1, dtype=np.int64)
    with pytest.raises(CorruptDataError):
        codec.decode(data, zero, np.array([len(data)]), zero, out)


@both
def test_memory_that_is_not_aligned_or_not_contiguous(method: str) -> None:
    frame = FrameSpec(50, np.dtype(np.float64))
    codec = create_codec(method, frame)
    records = make_records("stripes", 3, frame.nbytes, frame.dtype, seed=0)
    shifted = np.zeros(records.size + 1, dtype=np.uint8)[1:].reshape(records.shape)
    shifted[:] = records
    encoded = codec.encode(shifted, LANES)
    starts = np.cumsum(encoded.lengths) - encoded.lengths
    for out in (
        np.zeros_like(shifted, shape=shifted.size + 1)[1:].reshape(3, -1),
        np.zeros((3, 500), np.uint8)[:, :400],
    ):
        codec.decode(encoded.data, starts, encoded.lengths, encoded.references, out)
        np.testing.assert_array_equal(out, records)


@pytest.mark.parametrize("runs_type", [np.float32, bool, object, 3, "uint17"])
def test_run_types_must_be_integers(runs_type: type) -> None:
    with pytest.raises(ConfigurationError, match="runs_type"):
        create_codec("rle", FrameSpec(10, np.dtype(np.uint8)), runs_type=runs_type)


def test_signed_run_types_are_as_wide_as_they_look() -> None:
    codec = create_codec("rle", FrameSpec(255, np.dtype(np.uint8)), runs_type=np.int8)
    encoded = codec.encode(np.zeros((1, 255), dtype=np.uint8), np.zeros(1, dtype=np.int64))
    assert encoded.data.tolist() == [255, 0]
