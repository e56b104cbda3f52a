"""Indexed colour: exact with few colours and with many, planes or pixels, compiled or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.codecs import indexed_colour
from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.codecs.base import Codec, FrameSpec
from sb3_extra_buffers.codecs.indexed_colour import to_indices_numpy
from sb3_extra_buffers.codecs.registry import create_codec
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.errors import ConfigurationError
from tests.codecs.helpers import store
from tests.methods import installed

PIXELS = 120
needs_numba = pytest.mark.skipif(not has_numba(), reason="needs numba")


def round_trip(codec: Codec, records: np.ndarray) -> np.ndarray:
    return store(codec, [records], np.zeros(len(records), dtype=np.int64)).decode(codec)


def frames(rng: np.random.Generator, n: int, n_colours: int, channels_last: bool) -> np.ndarray:
    colours = rng.integers(0, 256, (n_colours, 3), dtype=np.uint8)
    pixels = colours[rng.integers(0, n_colours, (n, PIXELS))]
    return np.ascontiguousarray(pixels if channels_last else pixels.swapaxes(1, 2)).reshape(n, 3 * PIXELS)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("n_colours", [1, 7, 256, 3000])
@pytest.mark.parametrize("method", installed("none", "delta", "bitpack", "pixel-lz", "zstd/3", "zstd-dict/3", "gzip/1"))
def test_frames_come_back_exactly(method: str, n_colours: int, channels_last: bool) -> None:
    spec = FrameSpec(3 * PIXELS, np.dtype(np.uint8), 3, channels_last)
    codec = create_codec(method, spec, indexed_colour=True)
    records = frames(np.random.default_rng(0), 12 * codec.frames_per_record, n_colours, channels_last)
    records = records.reshape(12, codec.record_bytes)
    np.testing.assert_array_equal(round_trip(codec, records), records)


def test_records_that_do_not_fit_into_the_palette_stand_between_those_that_do() -> None:
    rng = np.random.default_rng(1)
    codec = create_codec("gzip/1", FrameSpec(3 * PIXELS, np.dtype(np.uint8), 3), indexed_colour=True)
    parts = [frames(rng, 2, 40, False), frames(rng, 3, 5000, False), frames(rng, 2, 40, False)]
    records = np.concatenate([*parts, parts[0]])
    np.testing.assert_array_equal(round_trip(codec, records), records)


@pytest.mark.parametrize("method", installed("delta", "bitpack", "pixel-lz", "gzip/1"))
def test_nothing_but_raw_records_decode(method: str) -> None:
    codec = create_codec(method, FrameSpec(3 * PIXELS, np.dtype(np.uint8), 3), indexed_colour=True)
    records = frames(np.random.default_rng(4), 2 * codec.frames_per_record, 5000, False).reshape(2, -1)
    np.testing.assert_array_equal(round_trip(codec, records), records)


def test_a_pixel_takes_one_byte_instead_of_three() -> None:
    codec = create_codec("none", FrameSpec(3 * PIXELS, np.dtype(np.uint8), 3), indexed_colour=True)
    group = codec.frames_per_record
    records = frames(np.random.default_rng(2), group, 200, False).reshape(1, codec.record_bytes)
    assert codec.encode(records, np.zeros(1, dtype=np.int64)).lengths.tolist() == [group * PIXELS]


@pytest.mark.parametrize("channels_last", [False, True])
def test_compiled_and_numpy_form_have_the_same_palette_and_indices(channels_last: bool) -> None:
    pytest.importorskip("numba")
    kernels = load_kernels("sb3_extra_buffers.codecs.indexed_kernels")
    rng, group = np.random.default_rng(3), 2
    # With a few new colours, and with more than are left, by turns.
    records = np.concatenate([frames(rng, group, n, channels_last) for n in (60, 5000, 60, 5000, 90, 400, 40, 80)])
    records = records.reshape(-1, group * 3 * PIXELS)
    results = []
    for to_indices in (kernels.to_indices, to_indices_numpy):
        palette, count = np.zeros((256, 3), dtype=np.uint8), np.zeros(1, dtype=np.int64)
        indices, indexed = np.zeros((len(records), group * PIXELS), dtype=np.uint8), np.zeros(len(records), np.bool_)
        keys, values = np.zeros(1024, dtype=np.uint32), np.zeros(1024, dtype=np.uint8)
        to_indices(records, group, channels_last, keys, values, palette, count, indices, indexed)
        results.append((indexed, count, palette[: count[0]], indices[indexed]))
    assert results[0][0].tolist() == [True, False, True, False, True, False, True, False]
    for compiled, numpy in zip(*results, strict=True):
        np.testing.assert_array_equal(compiled, numpy)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_numba), False])
def test_a_noisy_frame_leaves_the_palette_to_others(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(indexed_colour, "load_kernels", lambda module: None)
    rng = np.random.default_rng(5)
    codec = create_codec("gzip/1", FrameSpec(3 * 600, np.dtype(np.uint8), 3, True), indexed_colour=True)
    noise, flat = rng.integers(0, 256, (1, 1800), dtype=np.uint8), np.zeros((1, 1800), dtype=np.uint8)
    assert codec.encode(noise, np.zeros(1, dtype=np.int64)).lengths.tolist() == [1800]
    assert codec.encode(flat, np.zeros(1, dtype=np.int64)).lengths[0] < 100
    np.testing.assert_array_equal(round_trip(codec, np.concatenate([noise, flat])), np.concatenate([noise, flat]))


@pytest.mark.parametrize("method", installed("none", "bitpack", "delta-zstd", "zstd-dict/3"))
def test_the_store_is_told_what_the_inner_codec_would_tell_it(method: str) -> None:
    codec: Any = create_codec(method, FrameSpec(3 * PIXELS, np.dtype(np.uint8), 3), indexed_colour=True)
    assert codec.encodes_together == codec.inner.encodes_together
    assert codec.min_encoded_size == codec.inner.min_encoded_size


@pytest.mark.parametrize("method", installed("delta-zstd", "zstd-dict/3"))
def test_the_encoder_of_the_inner_codec_is_freed(method: str) -> None:
    codec = create_codec(method, FrameSpec(3 * PIXELS, np.dtype(np.uint8), 3), indexed_colour=True)
    records = frames(np.random.default_rng(6), 20 * codec.frames_per_record, 200, False).reshape(20, -1)
    codec.encode(records, np.zeros(20, dtype=np.int64))
    before = codec.reference_bytes
    codec.free_encoder()
    assert codec.reference_bytes < before - 1000


def test_only_rgb_images_can_be_indexed() -> None:
    with pytest.raises(ConfigurationError, match="RGB images of dtype uint8"):
        create_codec("gzip", FrameSpec(84 * 84, np.dtype(np.uint8)), indexed_colour=True)
