"""What every codec must do, run over the whole registry: a new codec is tested by registering it."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_extra_buffers.codecs import chains, packed_frames, zstd
from sb3_extra_buffers.codecs.base import NO_REFERENCE, FrameSpec
from sb3_extra_buffers.codecs.registry import codec_class, create_codec, option_names, parse_method
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.storage.pickling import unpickled
from tests.codecs.helpers import CONTENTS, DTYPES, Stored, frame_specs, make_records, store, usable_methods

every_method = pytest.mark.parametrize("method", usable_methods())
seeds = st.integers(0, 2**32 - 1)


@every_method
@given(
    frame=frame_specs(),
    contents=st.lists(st.sampled_from(CONTENTS), min_size=1, max_size=3),
    n_lanes=st.integers(1, 5),
    seed=seeds,
)
def test_records_come_back_bit_for_bit(
    method: str, frame: FrameSpec, contents: list[str], n_lanes: int, seed: int
) -> None:
    codec = create_codec(method, frame)
    batches = [make_records(content, n_lanes, codec.record_bytes, frame.dtype, seed) for content in contents]
    stored = store(codec, batches, np.arange(n_lanes))
    records = np.concatenate(batches)
    order = np.random.default_rng(seed).integers(0, len(records), 2 * len(records))  # some twice, in any order
    np.testing.assert_array_equal(stored.decode(codec, order), records[order])
    codec.release(stored.references)


@every_method
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_frames_of_one_element(method: str, dtype: np.dtype) -> None:
    codec = create_codec(method, FrameSpec(1, dtype))
    records = make_records("noise", 4, codec.record_bytes, dtype, seed=0)
    stored = store(codec, [records], np.arange(4))
    np.testing.assert_array_equal(stored.decode(codec), records)


@every_method
@pytest.mark.parametrize("size", [7056, 70_000])
def test_large_frames_and_many_records(method: str, size: int) -> None:
    """Large enough for the paths that work in threads."""
    frame = FrameSpec(size, np.dtype(np.uint8))
    codec = create_codec(method, frame)
    n_lanes = max((5 << 20) // codec.record_bytes, 1)
    batches = [make_records(kind, n_lanes, codec.record_bytes, frame.dtype, seed=1) for kind in ("sparse", "noise")]
    stored = store(codec, batches, np.arange(n_lanes))
    np.testing.assert_array_equal(stored.decode(codec), np.concatenate(batches))


@every_method
def test_every_level_family_is_exact(method: str) -> None:
    levels = codec_class(method).levels
    frame = FrameSpec(333, np.dtype(np.float32))
    for level in sorted({levels[0], levels[len(levels) // 2], levels[-1]}) if levels else []:
        codec = create_codec(method, frame, compresslevel=level)
        records = make_records("special", 3, codec.record_bytes, frame.dtype, seed=level + 100_000)
        stored = store(codec, [records], np.arange(3))
        np.testing.assert_array_equal(stored.decode(codec), records)


@every_method
def test_repetition_is_compressed_and_noise_is_not_enlarged(method: str) -> None:
    frame = FrameSpec(500, np.dtype(np.uint8))
    codec = create_codec(method, frame)
    noise = codec.encode(make_records("noise", 3, codec.record_bytes, frame.dtype, seed=2), np.arange(3))
    assert (noise.lengths <= codec.record_bytes).all()
    constant = codec.encode(np.zeros((3, codec.record_bytes), dtype=np.uint8), np.arange(3))
    assert method == "none" or (constant.lengths < codec.record_bytes // 2).all()


@every_method
@settings(max_examples=60)
@given(
    frame=frame_specs(), content=st.sampled_from(CONTENTS), seed=seeds, damage=st.sampled_from(["flip", "cut", "junk"])
)
def test_corrupt_bytes_raise_or_decode_to_the_right_size(
    method: str, frame: FrameSpec, content: str, seed: int, damage: str
) -> None:
    codec = create_codec(method, frame)
    records = make_records(content, 2, codec.record_bytes, frame.dtype, seed)
    stored = store(codec, [records], np.arange(2))
    random = np.random.default_rng(seed)
    if damage == "flip":
        place = stored.starts[0] + random.integers(0, max(stored.lengths[0], 1))
        stored.arena[place] ^= 1 << random.integers(0, 8)
    elif damage == "cut":
        stored.lengths[0] = random.integers(0, max(stored.lengths[0], 1))
    else:
        stored.arena[:] = random.integers(0, 256, len(stored.arena))
        stored.lengths[:] = random.integers(0, stored.lengths + 1)
    # The guards around the output are checked in any case.
    with contextlib.suppress(CorruptDataError):
        stored.decode(codec)


@every_method
def test_records_outside_the_arena_are_corrupt(method: str) -> None:
    frame = FrameSpec(64, np.dtype(np.uint8))
    codec = create_codec(method, frame)
    stored = store(codec, [np.zeros((1, codec.record_bytes), dtype=np.uint8)], np.zeros(1, dtype=np.int64))
    short = Stored(stored.arena[: stored.starts[0] + 1].copy(), stored.starts, stored.lengths, stored.references)
    with pytest.raises(CorruptDataError):
        short.decode(codec)


@every_method
@pytest.mark.parametrize("compiled", [True, False])
def test_records_before_the_arena_are_corrupt(method: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from its end, as NumPy would do, there is a record."""
    codec = create_codec(method, FrameSpec(64, np.dtype(np.uint8)))
    stored = store(codec, [np.zeros((1, codec.record_bytes), dtype=np.uint8)], np.zeros(1, dtype=np.int64))
    if not compiled and method != "rle-jit":
        for module in (chains, packed_frames, zstd):
            monkeypatch.setattr(module, "load_kernels", lambda name: None)
    arena = np.append(stored.arena, np.zeros(5, dtype=np.uint8))
    with pytest.raises(CorruptDataError):
        Stored(arena, stored.starts - len(arena), stored.lengths, stored.references).decode(codec)


@every_method
def test_no_records_are_decoded_from_an_empty_arena(method: str) -> None:
    codec = create_codec(method, FrameSpec(64, np.dtype(np.uint8)))
    nothing = np.zeros(0, dtype=np.int64)
    codec.decode(np.zeros(0, dtype=np.uint8), nothing, nothing, nothing, np.zeros((0, codec.record_bytes), np.uint8))


@every_method
@pytest.mark.parametrize("duplicate", [lambda state: pickle.loads(pickle.dumps(state)), copy.deepcopy])
def test_copies_decode_what_the_original_wrote(method: str, duplicate) -> None:
    frame = FrameSpec(300, np.dtype(np.float32))
    codec = create_codec(method, frame)
    batches = [make_records(content, 2, codec.record_bytes, frame.dtype, seed=3) for content in CONTENTS]
    stored = store(codec, batches, np.arange(2))
    twin = create_codec(method, frame)
    twin.restore(unpickled(duplicate(codec.state())))
    assert twin.count_uses(stored.references)
    assert twin.label == codec.label
    np.testing.assert_array_equal(stored.decode(twin), np.concatenate(batches))
    more = make_records("stripes", 2, codec.record_bytes, frame.dtype, seed=4)
    np.testing.assert_array_equal(store(twin, [more], np.arange(2)).decode(twin), more)


@every_method
def test_two_threads_decode_at_once(method: str) -> None:
    frame = FrameSpec(2000, np.dtype(np.uint8))
    codec = create_codec(method, frame)
    records = make_records("sparse", 60, codec.record_bytes, frame.dtype, seed=5)
    stored = store(codec, [records], np.arange(60))
    wrong: list[object] = []

    def work() -> None:
        try:
            for _ in range(20):
                np.testing.assert_array_equal(stored.decode(codec), records)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@every_method
def test_input_is_left_alone_and_not_kept(method: str) -> None:
    frame = FrameSpec(300, np.dtype(np.uint8))
    codec = create_codec(method, frame)
    records = make_records("noise", 2, codec.record_bytes, frame.dtype, seed=6)
    original = records.copy()
    records.flags.writeable = False
    encoded = codec.encode(records, np.arange(2))
    np.testing.assert_array_equal(records, original)
    records.flags.writeable = True
    records[:] = 0
    starts = np.cumsum(encoded.lengths) - encoded.lengths
    out = np.empty_like(records)
    codec.decode(encoded.data, starts, encoded.lengths, encoded.references, out)
    np.testing.assert_array_equal(out, original)


@every_method
def test_labels_are_methods(method: str) -> None:
    codec = create_codec(method, FrameSpec(4, np.dtype(np.uint8)))
    parsed = parse_method(codec.label)
    assert parsed.name == method == codec.name
    assert (parsed.level is None) == (not codec.levels)
    assert ("compresslevel" in option_names(method)) == bool(codec.levels)


def test_codecs_without_references_say_so() -> None:
    codec = create_codec("gzip", FrameSpec(9, np.dtype(np.uint8)))
    encoded = codec.encode(np.zeros((2, 9), dtype=np.uint8), np.arange(2))
    assert (encoded.references == NO_REFERENCE).all()
    assert codec.reference_bytes == 0
