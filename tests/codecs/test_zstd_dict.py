"""``zstd-dict``: which frames dictionaries are made of, and what the codec keeps for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.codecs.base import FrameSpec
from sb3_extra_buffers.codecs.registry import create_codec
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.storage.pickling import unpickled
from tests.codecs.helpers import store

pytest.importorskip("zstandard", exc_type=ImportError)
LANE = np.zeros(1, dtype=np.int64)


@pytest.mark.parametrize("frame_bytes", [1000, 100_000, 600_000])
def test_the_second_planned_dictionary_is_made_whatever_the_size_of_frames(frame_bytes: int) -> None:
    codec: Any = create_codec("zstd-dict/1", FrameSpec(frame_bytes, np.dtype(np.uint8)))
    record = np.zeros((1, frame_bytes), dtype=np.uint8)
    n_frames = 65 * min(16, (1 << 20) // frame_bytes) + 20
    references = {codec.encode(record, LANE).references[0] for _ in range(n_frames)}
    assert references == {0, 1, 2}


def test_frames_larger_than_half_a_dictionary_do_not_pile_up() -> None:
    frame = FrameSpec(600_000, np.dtype(np.uint8))
    codec = create_codec("zstd-dict/1", frame)
    record = np.zeros((1, frame.nbytes), dtype=np.uint8)
    for _ in range(64 * 8):
        codec.release(codec.encode(record, LANE).references)
    assert codec.reference_bytes < 3 * frame.nbytes  # a dictionary, a frame for the next one, and libzstd's tables


def test_a_codec_without_its_encoder_keeps_only_dictionaries_and_still_encodes() -> None:
    frame = FrameSpec(5000, np.dtype(np.uint8))
    codec: Any = create_codec("zstd-dict/3", frame)
    noise = np.random.default_rng(0).integers(0, 256, (40, frame.nbytes), dtype=np.uint8)
    stored = store(codec, [noise], np.zeros(40, dtype=np.int64))
    more = store(codec, [noise], np.zeros(40, dtype=np.int64))
    before = codec.reference_bytes
    codec.free_encoder()
    assert codec.reference_bytes <= before - 16 * frame.nbytes
    np.testing.assert_array_equal(stored.decode(codec), noise)
    np.testing.assert_array_equal(more.decode(codec), noise)
    np.testing.assert_array_equal(store(codec, [noise] * 40, np.zeros(40, dtype=np.int64)).decode(codec)[-40:], noise)


@pytest.mark.parametrize("name", ["", "one", "-1", "0", "1.5", "01", str(1 << 40)])
def test_a_state_whose_dictionaries_have_no_valid_numbers_is_an_error(name: str) -> None:
    codec: Any = create_codec("zstd-dict", FrameSpec(100, np.dtype(np.uint8)))
    while not codec._current:
        codec.encode(np.zeros((1, 100), dtype=np.uint8), LANE)
    state: Any = codec.state()
    dictionaries = {**state["dictionaries"], name: state["dictionaries"]["1"]}
    with pytest.raises(CorruptDataError, match="have the numbers"):
        create_codec("zstd-dict", codec.frame).restore(unpickled({**state, "dictionaries": dictionaries}))
