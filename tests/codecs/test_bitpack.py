"""``bitpack``: compiled and plain code write the same bytes, and no bytes make them read or write elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_extra_buffers.codecs import packed_frames
from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.codecs.base import FrameSpec
from sb3_extra_buffers.codecs.bitpack import BLOCK_BYTES, N_PREDICTORS, BitpackCodec, default_predictors
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.storage.pickling import unpickled
from tests.codecs.helpers import decoded_between_guards, record_of, store

needs_numba = pytest.mark.skipif(not has_numba(), reason="needs numba")
LANE = np.zeros(1, dtype=np.int64)


@st.composite
def images(draw: st.DrawFn) -> tuple[FrameSpec, np.ndarray]:
    """Records of three frames, some blocks of which need few bits, after a prediction or without one."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    channels, row, n_rows = draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, 7, 32, 45, 64])), 12
    spec = FrameSpec(channels * row * n_rows, np.dtype(np.uint8), channels, draw(st.booleans()), row)
    frames = rng.integers(0, 256, (draw(st.integers(1, 3)) * 3, channels, n_rows, row), dtype=np.uint8)
    for frame in frames:
        kind = draw(st.sampled_from(["noise", "smooth", "tiles", "grey", "constant"]))
        if kind == "smooth":
            frame[:] = np.cumsum(frame >> 5, axis=1, dtype=np.uint8)
        elif kind == "tiles":
            frame[:, 3:] = np.tile(frame[:, :3], (1, 3, 1))
        elif kind == "grey":
            frame[1:] = frame[:1] + (frame[1:] >> draw(st.integers(4, 8)))
        elif kind == "constant":
            frame[:] = draw(st.integers(0, 255))
        frame[:, 0, :1] = rng.integers(0, 256)  # a sharp edge
    return spec, frames.reshape(-1, 3 * spec.nbytes)


@settings(deadline=None)
@given(images())
def test_compiled_bytes_are_the_same(case: tuple[FrameSpec, np.ndarray]) -> None:
    spec, records = case
    codec, lanes = BitpackCodec(spec, frames_per_record=3), np.zeros(len(records), dtype=np.int64)
    compiled = codec.encode(records, lanes)
    stored = store(codec, [records], lanes)
    np.testing.assert_array_equal(stored.decode(codec), records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_frames, "load_kernels", lambda _: None)
        plain = codec.encode(records, lanes)
        np.testing.assert_array_equal(stored.decode(codec), records)
    for ours, expected in zip(compiled, plain, strict=True):
        np.testing.assert_array_equal(ours, expected)


def header(predictor: int, width: int, offset: int) -> bytes:
    return (predictor | width << 4 | offset << 8).to_bytes(2, "little")


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_numba), False])
def test_the_format_is_the_documented_one(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(packed_frames, "load_kernels", lambda _: None)
    frame = FrameSpec(3 * BLOCK_BYTES + 2, np.dtype(np.uint8), row_bytes=BLOCK_BYTES)
    codec = BitpackCodec(frame, frames_per_record=1)
    assert codec.predictors[1].tolist() == [32, 32, 0, 0]
    # Three bits each for 0, 1, ..., 7, 0, ... above 100; the row above plus 255, without bits; two rows above plus 3.
    numbers = sum(number << 3 * number for number in range(8)).to_bytes(3, "little")
    body = header(0, 3, 100) + header(1, 0, 255) + header(2, 0, 3) + 4 * numbers + bytes([8, 9])
    first = 100 + np.arange(BLOCK_BYTES) % 8
    np.testing.assert_array_equal(
        decoded_between_guards(codec, record_of(BitpackCodec, body)), [*first, *(first - 1), *(first + 3), 8, 9]
    )


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_numba), False])
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(header(0, 9, 0) + bytes(36), id="a width of more than a byte"),
        pytest.param(header(1, 0, 0), id="a row above the first one"),
        pytest.param(header(0, 8, 0) + bytes(31), id="too few bits"),
        pytest.param(header(0, 0, 0) + bytes(1), id="a byte too many"),
        pytest.param(b"\0", id="no room for a header"),
    ],
)
def test_forged_frames_are_refused(body: bytes, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(packed_frames, "load_kernels", lambda _: None)
    codec = BitpackCodec(FrameSpec(BLOCK_BYTES, np.dtype(np.uint8), row_bytes=BLOCK_BYTES), frames_per_record=2)
    good = header(0, 0, 7)
    assert (decoded_between_guards(codec, record_of(BitpackCodec, good, good)) == 7).all()
    for frames in ((body, good), (good, body)):
        with pytest.raises(CorruptDataError):
            decoded_between_guards(codec, record_of(BitpackCodec, *frames))
    for damaged in (
        record_of(BitpackCodec, good, good)[:-1],
        record_of(BitpackCodec, good),
        record_of(BitpackCodec, good, good, good),
    ):
        with pytest.raises(CorruptDataError):
            decoded_between_guards(codec, damaged)


def test_untrusted_predictors_are_errors() -> None:
    codec = BitpackCodec(FrameSpec(4096, np.dtype(np.uint8), row_bytes=64))
    right: Any = codec.state()["predictors"]
    for number, entry in [(0, [64, 64, 0, 0]), (1, [0, 64, 0, 0]), (1, [31, 31, 0, 0]), (3, [64, -64, 64, 64])]:
        wrong = right.copy()
        wrong[number] = entry
        with pytest.raises(CorruptDataError, match="predictors"):
            codec.restore(unpickled({"predictors": wrong}))
    assert not codec.accepts(unpickled({"predictors": np.zeros_like(right)}))
    codec.restore(unpickled({"predictors": right}))


@pytest.mark.parametrize("row_bytes", [0, 1, 31, 84, 288, 100_000])
@pytest.mark.parametrize("channels", [1, 3])
def test_no_prediction_is_made_of_its_own_block(row_bytes: int, channels: int) -> None:
    predictors = default_predictors(FrameSpec(300, np.dtype(np.uint8), channels, row_bytes=row_bytes))
    assert predictors.shape == (N_PREDICTORS, 4)
    assert not predictors[0].any()
    places = predictors[:, 1:]
    assert ((places == 0) | (places >= BLOCK_BYTES)).all()
    np.testing.assert_array_equal(predictors[:, 0], places.max(axis=1))


def test_textured_colours_are_packed() -> None:
    """A smooth picture in which the colours differ little, and a texture that repeats after seven rows."""
    rng = np.random.default_rng(0)
    smooth = np.cumsum(rng.integers(-3, 4, (64, 64)), axis=0) + rng.integers(0, 200, 64)
    texture = np.resize(rng.integers(0, 256, (7, 64)), (64, 64))
    colours = rng.integers(0, 4, (3, 64, 64))
    for image in (smooth + colours, texture + 0 * colours):
        record = image.astype(np.uint8).reshape(1, -1)
        codec = BitpackCodec(FrameSpec(record.size, np.dtype(np.uint8), 3, row_bytes=64), frames_per_record=1)
        assert codec.encode(record, LANE).lengths[0] < record.size / 2
