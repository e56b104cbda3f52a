"""``pixel-lz``: compiled and plain code read each other's bytes, and no bytes make them read or write elsewhere."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_extra_buffers.codecs import packed_frames
from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.codecs.base import FrameSpec
from sb3_extra_buffers.codecs.bitpack import BitpackCodec
from sb3_extra_buffers.codecs.pixel_lz import LONGEST_DISTANCE, PixelLzCodec
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.storage.pickling import unpickled
from tests.codecs.helpers import decoded_between_guards, record_of, store

needs_numba = pytest.mark.skipif(not has_numba(), reason="needs numba")
LANE = np.zeros(1, dtype=np.int64)


@st.composite
def images(draw: st.DrawFn) -> tuple[FrameSpec, np.ndarray]:
    """Records of three frames, in which pixels repeat from all kinds of distances."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    channels, row, n_rows = draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, 7, 31, 64, 100])), 14
    spec = FrameSpec(channels * row * n_rows, np.dtype(np.uint8), channels, draw(st.booleans()), row)
    frames = rng.integers(0, 256, (draw(st.integers(1, 3)) * 3, channels, n_rows, row), dtype=np.uint8)
    for frame in frames:
        kind = draw(st.sampled_from(["noise", "few colours", "tiles", "stripes", "constant"]))
        if kind == "few colours":
            frame[:] = rng.integers(0, 2, (n_rows, row)) * 255
        elif kind == "tiles":
            frame[:] = np.tile(frame[:, :7, :7], (1, 2, -(-row // 7)))[:, :, :row]
        elif kind == "stripes":
            frame[:] = np.arange(row) % draw(st.integers(1, 40)) * 5
        elif kind == "constant":
            frame[:] = draw(st.integers(0, 255))
        frame[:, rng.integers(n_rows), rng.integers(row)] = rng.integers(0, 256)
    return spec, frames.reshape(-1, 3 * spec.nbytes)


@needs_numba
@settings(deadline=None)
@given(images())
def test_compiled_and_plain_code_read_each_others_bytes(case: tuple[FrameSpec, np.ndarray]) -> None:
    spec, records = case
    codec, lanes = PixelLzCodec(spec, frames_per_record=3), np.zeros(len(records), dtype=np.int64)
    by_kernel = store(codec, [records], lanes)
    np.testing.assert_array_equal(by_kernel.decode(codec), records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_frames, "load_kernels", lambda _: None)
        np.testing.assert_array_equal(by_kernel.decode(codec), records)
        by_numpy = store(codec, [records], lanes)
        np.testing.assert_array_equal(by_numpy.decode(codec), records)
    np.testing.assert_array_equal(by_numpy.decode(codec), records)


@needs_numba
def test_the_same_frames_give_the_same_bytes_whatever_was_in_memory() -> None:
    rng = np.random.default_rng(0)
    spec = FrameSpec(3 * 64 * 64, np.dtype(np.uint8), 3, row_bytes=64)
    codec = PixelLzCodec(spec)
    record = np.tile(rng.integers(0, 4, (1, 64), dtype=np.uint8), (1, codec.record_bytes // 64))
    first = codec.encode(record, LANE).data.copy()
    assert len(first) < codec.record_bytes // 8
    for _ in range(20):
        codec.encode(rng.integers(0, 256, record.shape, dtype=np.uint8), LANE)
        np.testing.assert_array_equal(codec.encode(record, LANE).data, first)


@needs_numba
def test_noise_on_a_gradient_is_left_to_bitpack() -> None:
    rng = np.random.default_rng(0)
    image = np.add.outer(np.arange(84), np.arange(84)) // 2 + rng.integers(0, 4, (3, 84, 84))
    spec, record = FrameSpec(image.size, np.dtype(np.uint8), 3, row_bytes=84), image.astype(np.uint8).reshape(1, -1)
    by_copies = PixelLzCodec(spec, frames_per_record=1).encode(record, LANE)
    by_differences = BitpackCodec(spec, frames_per_record=1).encode(record, LANE)
    assert len(by_differences.data) < 0.6 * len(by_copies.data)


@needs_numba
def test_copies_reach_as_far_back_as_a_step_can_say() -> None:
    rng = np.random.default_rng(0)
    tile = rng.integers(0, 256, (3, 40), dtype=np.uint8)
    for distance, found in ((LONGEST_DISTANCE, True), (LONGEST_DISTANCE + 1, False)):
        frame = np.repeat(rng.integers(0, 256, (3, LONGEST_DISTANCE // 31 + 2), dtype=np.uint8), 31, axis=1)
        frame[:, :40] = tile
        frame[:, distance : distance + 40] = tile
        codec = PixelLzCodec(FrameSpec(frame.size, frame.dtype, 3), frames_per_record=1)
        record = frame.reshape(1, -1)
        encoded = store(codec, [record], LANE)
        np.testing.assert_array_equal(encoded.decode(codec), record)
        without = record.copy()
        without.reshape(frame.shape)[:, distance : distance + 40] = rng.integers(0, 256, tile.shape)
        saved = len(codec.encode(without, LANE).data) - len(codec.encode(record, LANE).data)
        assert (saved > 90) == found


@needs_numba
def test_the_time_to_encode_grows_with_the_frame_only() -> None:
    pattern, times = np.arange(29, dtype=np.uint8), {}
    for size in (200_000, 800_000):
        frame = np.resize(pattern, size)
        frame[29:40_029] = 7  # the first pattern is too far away for a copy
        codec = PixelLzCodec(FrameSpec(size, frame.dtype), frames_per_record=1)
        codec.encode(frame[None], LANE)
        began = time.thread_time()
        codec.encode(frame[None], LANE)
        times[size] = time.thread_time() - began
    assert times[800_000] < 12 * times[200_000]


def step(n_literals: int, n_copied: int = 0, distance: int = 0) -> bytes:
    return (n_literals | n_copied << 4 | distance << 9).to_bytes(3, "little")


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_numba), False])
def test_the_format_is_the_documented_one(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(packed_frames, "load_kernels", lambda _: None)
    codec = PixelLzCodec(FrameSpec(3 * 48, np.dtype(np.uint8), 3), frames_per_record=1)
    # Three literals; a run of the last one; five from the beginning; one literal; the five again.
    literals = bytes([1, 2, 3, 11, 12, 13, 21, 22, 23]) + bytes([9, 19, 29])
    steps = [step(3, 31, 1), step(0, 5, 34), step(1, 8, 40)]
    plane = np.array([1, 2, *[3] * 32, 1, 2, 3, 3, 3, 9, 1, 2, 3, 3, 3, 3, 3, 3])
    expected = [*plane, *plane + 10, *plane + 20]
    np.testing.assert_array_equal(
        decoded_between_guards(codec, record_of(PixelLzCodec, literals + b"".join(steps[::-1]))), expected
    )


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_numba), False])
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(step(0, 31, 1), id="a copy from before the first pixel"),
        pytest.param(b"\7" + step(0, 4, 2) + step(1, 31, 1), id="a copy of more pixels than its distance"),
        pytest.param(b"\7" + step(0, 4, 34) + step(1, 31, 1), id="a distance beyond the first pixel"),
        pytest.param(b"\7" + step(0, 5, 1) + step(1, 31, 1), id="a pixel too many"),
        pytest.param(b"\7" + step(0, 3, 1) + step(1, 31, 1), id="a pixel too few"),
        pytest.param(b"\7\7" + step(0, 4, 1) + step(1, 31, 1), id="a literal too many"),
        pytest.param(step(0, 4, 1) + step(1, 31, 1), id="a literal too few"),
        pytest.param(b"\7" + step(15), id="literals that are not there"),
        pytest.param(b"\7", id="no room for a step"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_forged_frames_are_refused(body: bytes, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(packed_frames, "load_kernels", lambda _: None)
    codec = PixelLzCodec(FrameSpec(36, np.dtype(np.uint8)), frames_per_record=2)
    good = b"\7" + step(0, 4, 1) + step(1, 31, 1)
    assert (decoded_between_guards(codec, record_of(PixelLzCodec, good, good)) == 7).all()
    for frames in ((body, good), (good, body)):
        with pytest.raises(CorruptDataError):
            decoded_between_guards(codec, record_of(PixelLzCodec, *frames))
    for damaged in (
        record_of(PixelLzCodec, good, good)[:-1],
        record_of(PixelLzCodec, good),
        record_of(PixelLzCodec, good, good, good),
    ):
        with pytest.raises(CorruptDataError):
            decoded_between_guards(codec, damaged)


@needs_numba
@settings(deadline=None)
@given(st.binary(max_size=80), st.sampled_from([1, 3]))
def test_random_bytes_decode_inside_their_frame_or_not_at_all(body: bytes, channels: int) -> None:
    codec = PixelLzCodec(FrameSpec(36, np.dtype(np.uint8), channels), frames_per_record=1)
    record = record_of(PixelLzCodec, body)
    if len(record) == codec.record_bytes:
        return
    results = []
    for kernels in (packed_frames.load_kernels, lambda _: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed_frames, "load_kernels", kernels)
            try:
                results.append(decoded_between_guards(codec, record).tolist())
            except CorruptDataError:
                results.append(None)
    assert results[0] == results[1]


def test_untrusted_planes_are_errors() -> None:
    codec = PixelLzCodec(FrameSpec(64, np.dtype(np.uint8)))
    assert codec.state() == {"planes": 1}
    for wrong in (0, 2, 3, 4, "1"):
        with pytest.raises(CorruptDataError, match="planes"):
            codec.restore(unpickled({"planes": wrong}))
    colour = PixelLzCodec(FrameSpec(3 * 64, np.dtype(np.uint8), 3))
    assert colour.planes == 3
    assert not colour.accepts(unpickled(codec.state()))
    colour.restore(unpickled({"planes": 1}))
    assert colour.planes == 1


@pytest.mark.parametrize(
    "frame",
    [
        FrameSpec(3 * 64, np.dtype(np.uint8), 3, channels_last=True),
        FrameSpec(3 * 64, np.dtype(np.uint16), 3),
        FrameSpec(64, np.dtype(np.float32)),
    ],
)
def test_pixels_are_bytes_unless_a_frame_has_three_planes_of_bytes(frame: FrameSpec) -> None:
    assert PixelLzCodec(frame).planes == 1
