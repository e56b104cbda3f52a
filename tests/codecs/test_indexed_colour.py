"""Indexed colour: exact with few colours and with many, planes or pixels, compiled or not."""

from __future__ import annotations

import numpy as np
import pytest

from sb3_extra_buffers.codecs.base import Codec, FrameSpec
from sb3_extra_buffers.codecs.indexed_colour import to_indices_numpy
from sb3_extra_buffers.codecs.registry import create_codec
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.errors import ConfigurationError
from tests.codecs.helpers import store
from tests.methods import installed

PIXELS = 120


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
def test_compiled_and_plain_form_agree_on_the_pixels(channels_last: bool) -> None:
    pytest.importorskip("numba")
    kernels = load_kernels("sb3_extra_buffers.codecs.indexed_kernels")
    records = frames(np.random.default_rng(3), 9, 300, channels_last)
    results = []
    for to_indices in (kernels.to_indices, to_indices_numpy):
        palette, count = np.zeros((256, 3), dtype=np.uint8), np.zeros(1, dtype=np.int64)
        indices, indexed = np.zeros((9, PIXELS), dtype=np.uint8), np.zeros(9, dtype=np.bool_)
        keys, values = np.zeros(1024, dtype=np.uint32), np.zeros(1024, dtype=np.uint8)
        to_indices(records, 1, channels_last, keys, values, palette, count, indices, indexed)
        results.append(palette[indices[indexed]])
        # Both take what fits, but a record that turns out not to fit may leave colours behind in the compiled form.
        assert indexed[:2].all()
    np.testing.assert_array_equal(results[0][:2], results[1][:2])


def test_only_rgb_images_can_be_indexed() -> None:
    with pytest.raises(ConfigurationError, match="RGB images of dtype uint8"):
        create_codec("gzip", FrameSpec(84 * 84, np.dtype(np.uint8)), indexed_colour=True)
