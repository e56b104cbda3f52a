"""``delta``: compiled and plain code understand each other, and no bytes make them read or write elsewhere."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_extra_buffers.codecs import delta
from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.codecs.base import FrameSpec
from sb3_extra_buffers.codecs.delta import (
    LONGEST_MATCH,
    PREVIOUS,
    WHOLE,
    ZERO,
    DeltaCodec,
    decode_numpy,
    default_distances,
    header_bytes,
)
from sb3_extra_buffers.codecs.delta_words import DeltaWordsCodec
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.pickling import unpickled
from sb3_extra_buffers.storage.stacking import StackLayout

SIZES = (1, 2, 7, 63, 64, 65, 128, 600, 1331, (1 << 14) + 5)
LANE = np.zeros(1, dtype=np.int64)


@st.composite
def records(draw: st.DrawFn) -> tuple[FrameSpec, int, list[np.ndarray]]:
    """Records of frames that stay, change a little, move, repeat themselves, turn to zeros, or are something new."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size, group = draw(st.sampled_from(SIZES)), draw(st.integers(1, 5))
    row = draw(st.sampled_from([0, 1, 5, 20, 84]))
    frame = rng.integers(0, draw(st.sampled_from([2, 256])), size, dtype=np.uint8)
    made = []
    for _ in range(draw(st.integers(1, 4))):
        frames = []
        for _ in range(group):
            kind = draw(st.sampled_from(["same", "few", "few", "runs", "moved", "rows", "zeros", "noise"]))
            frame = frame.copy()
            first, last = np.sort(rng.integers(0, size + 1, 2))
            if kind == "few":
                frame[rng.integers(0, size, rng.integers(1, 12))] = rng.integers(0, 256)
            elif kind == "runs":
                frame[first:last] = rng.integers(0, 256)
            elif kind == "moved":
                frame = np.roll(frame, rng.integers(-3, 4))
            elif kind == "rows":
                period = rng.integers(1, 100)
                frame[first:last] = np.resize(rng.integers(0, 256, period, dtype=np.uint8), last - first)
            elif kind == "zeros":
                frame[:] = 0
            elif kind == "noise":
                frame[first:last] = rng.integers(0, 256, last - first)
            frames.append(frame)
        made.append(np.concatenate(frames)[None])
    return FrameSpec(size, np.dtype(np.uint8), row_bytes=row), group, made


def encoded(spec: FrameSpec, group: int, made: list[np.ndarray]) -> tuple[DeltaCodec, list[tuple[np.ndarray, int]]]:
    codec = DeltaCodec(spec, frames_per_record=group)
    results = [codec.encode(record, LANE) for record in made]
    return codec, [(result.data, int(result.references[0])) for result in results]


def decoded(codec: DeltaCodec, data: np.ndarray, reference: int) -> np.ndarray:
    """Between guards, and from the very end of memory."""
    memory = np.full(codec.record_bytes + 128, 0xA5, dtype=np.uint8)
    out = memory[64:-64].reshape(1, -1)
    try:
        codec.decode(data.copy(), LANE, np.array([len(data)]), np.array([reference]), out)
    finally:
        assert (memory[:64] == 0xA5).all()
        assert (memory[-64:] == 0xA5).all()
    return out[0]


def decoded_plainly(codec: DeltaCodec, data: np.ndarray, reference: int) -> np.ndarray:
    if len(data) == codec.record_bytes:
        return data
    base = codec.reference_frames[reference].view(np.uint8)[: codec.frame.nbytes]
    return decode_numpy(data, base, codec.frames_per_record, codec.distances).reshape(-1)


@settings(deadline=None)
@given(records())
def test_what_was_encoded_decodes(case: tuple[FrameSpec, int, list[np.ndarray]]) -> None:
    codec, results = encoded(*case)
    for record, (data, reference) in zip(case[2], results, strict=True):
        assert len(data) <= codec.max_encoded_size
        np.testing.assert_array_equal(decoded(codec, data, reference), record[0])
        np.testing.assert_array_equal(decoded_plainly(codec, data, reference), record[0])


@settings(deadline=None)
@given(records())
def test_without_numba_records_are_valid_as_well(case: tuple[FrameSpec, int, list[np.ndarray]]) -> None:
    spec, group, made = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "load_kernels", lambda _: None)
        codec, results = encoded(spec, group, made)
        plain = [decoded(codec, *result) for result in results]
    for record, result, row in zip(made, results, plain, strict=True):
        np.testing.assert_array_equal(row, record[0])
        np.testing.assert_array_equal(decoded(codec, *result), record[0])


def encode_before_a_guard(size: int) -> None:
    """Encode the worst frames. Memory behind them cannot be read, and bytes behind the output must not change."""
    rng, group, page = np.random.default_rng(size), 4, mmap.PAGESIZE
    codec = DeltaCodec(FrameSpec(size, np.dtype(np.uint8), row_bytes=min(20, size)), frames_per_record=group)
    n_bytes = 2 * group * size
    memory = mmap.mmap(-1, -(-n_bytes // page) * page + page)
    readable = np.frombuffer(memory, np.uint8)[: len(memory) - page]
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(readable.ctypes.data + len(readable)), ctypes.c_size_t(page), 0) == 0
    records = readable[len(readable) - n_bytes :].reshape(2, -1)
    kernels = delta.load_kernels(delta._ENCODE_KERNELS)

    def encode(*arguments: Any) -> int:
        *others, out, lengths, excess = arguments
        guarded = np.full(len(out) + 256, 0xA5, dtype=np.uint8)
        total = kernels.encode(*others, guarded[: len(out)], lengths, excess)
        assert (guarded[-256:] == 0xA5).all()
        out[:total] = guarded[:total]
        return int(total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "load_kernels", lambda name: SimpleNamespace(encode=encode))
        for period in (1, 2, 3, 4, 5, 6, 7, 64, size + 1):  # 5: nothing takes more steps than skipping 4 bytes
            frames = records.reshape(-1, size)
            frames[:] = rng.integers(0, 256, size)
            for frame in frames[1:]:
                frame[::period] = rng.integers(0, 256, len(frame[::period]))
            data, lengths, references = codec.encode(records, np.arange(2))
            for row, (start, length) in enumerate(zip((0, lengths[0]), lengths, strict=True)):
                found = decoded_plainly(codec, data[start : start + length], int(references[row]))
                np.testing.assert_array_equal(found, records[row])


@pytest.mark.skipif(not has_numba() or sys.platform != "linux", reason="needs numba, and mprotect of Linux")
@pytest.mark.parametrize("size", SIZES)
def test_encoding_neither_reads_nor_writes_beyond_its_memory(size: int) -> None:
    encode_before_a_guard(64)  # so that the child has nothing to compile
    child = multiprocessing.get_context("fork").Process(target=encode_before_a_guard, args=(size,))
    child.start()
    child.join()
    assert child.exitcode == 0


def encode_frames_that_malloc_maps() -> None:
    """Memory of more than 32 MB is unmapped as soon as it is freed, so any use of it after that is a crash."""
    frames = np.zeros((2, 17 << 20), dtype=np.uint8)
    frames[1, ::4096] = np.arange(len(frames[1, ::4096])) % 251 + 1
    codec = DeltaCodec(FrameSpec(frames.shape[1], np.dtype(np.uint8)), frames_per_record=2)
    encoded = codec.encode(frames.reshape(1, -1), LANE)
    np.testing.assert_array_equal(decoded(codec, encoded.data, int(encoded.references[0])), frames.reshape(-1))


@pytest.mark.skipif(not has_numba() or sys.platform != "linux", reason="needs numba, and malloc of Linux")
def test_encoding_keeps_its_scratch_memory_until_it_is_done() -> None:
    encode_before_a_guard(64)  # so that the child has nothing to compile
    child = multiprocessing.get_context("fork").Process(target=encode_frames_that_malloc_maps)
    child.start()
    child.join()
    assert child.exitcode == 0


@pytest.mark.skipif(not has_numba(), reason="needs numba")
@settings(deadline=None)
@given(records(), st.data())
def test_forged_records_are_refused_by_both_or_decode_to_the_same(
    case: tuple[FrameSpec, int, list[np.ndarray]], draw: st.DataObject
) -> None:
    codec, results = encoded(*case)
    data, reference = results[-1]
    forged = data.copy()
    rng = np.random.default_rng(draw.draw(st.integers(0, 2**32 - 1)))
    places = rng.integers(0, len(forged), rng.integers(1, 6))
    forged[places] = rng.integers(0, 256, len(places))
    if draw.draw(st.booleans()):
        forged = forged[: rng.integers(1, len(forged) + 1)]
    outcomes = []
    for decode in (decoded, decoded_plainly):
        try:
            outcomes.append(decode(codec, forged, reference))
        except CorruptDataError:
            outcomes.append(np.zeros(0, np.uint8))
    np.testing.assert_array_equal(*outcomes)


def body(*steps: int, literals: bytes = b"") -> bytes:
    return literals + b"".join(step.to_bytes(2, "little") for step in reversed(steps))


def record_of(kind: int, content: bytes) -> np.ndarray:
    return np.frombuffer((kind | len(content) << 2).to_bytes(2, "little") + content, dtype=np.uint8)


def skip(n_bytes: int, n_literals: int = 0) -> int:
    return n_bytes << 1 | n_literals << 10


def match(source: int, length: int, n_literals: int = 0) -> int:
    return 1 | source << 1 | (length - 3) << 6 | n_literals << 11


FORGED = {
    "shorter than its headers": np.zeros(1, np.uint8),
    "header says more": record_of(PREVIOUS, b"")[[1, 1]] + np.uint8(8),
    "half a step": record_of(PREVIOUS, b"\0"),
    "literals without a step": record_of(PREVIOUS, body(skip(0, 1), literals=b"ab")),
    "literals that are steps": record_of(PREVIOUS, body(skip(0, 9), literals=b"ab")),
    "literals beyond the end": record_of(PREVIOUS, body(skip(300, 1), literals=b"a")),
    "a match beyond the end": record_of(PREVIOUS, body(skip(290), match(0, 20))),
    "a match from before the start": record_of(PREVIOUS, body(skip(2), match(3, 20))),
    "a long match without its byte": record_of(PREVIOUS, body(skip(100), match(0, 34))),
    "a whole frame that is too short": record_of(WHOLE, bytes(99)),
    "a whole frame that is too long": record_of(WHOLE, bytes(301)),
    "zeros and a step too far": record_of(ZERO, body(*[skip(511, 1)] * 2, literals=b"ab")),
}


@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize("what", FORGED)
def test_every_rule_of_the_format_is_checked(what: str, numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not numba:
        monkeypatch.setattr(delta, "load_kernels", lambda _: None)
    codec = DeltaCodec(FrameSpec(300, np.dtype(np.uint8)), frames_per_record=1)
    with pytest.raises(CorruptDataError):
        decoded(codec, FORGED[what], 0)


@pytest.mark.parametrize("numba", [True, False])
def test_all_steps_do_what_the_format_says(numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not numba:
        monkeypatch.setattr(delta, "load_kernels", lambda _: None)
    size, distances = 1200, default_distances(FrameSpec(1, np.dtype(np.uint8)))
    codec = DeltaCodec(FrameSpec(size, np.dtype(np.uint8)), frames_per_record=1)
    np.testing.assert_array_equal(codec.distances, distances)
    expected = np.zeros(size, np.uint8)
    expected[5:8] = 1, 2, 3
    expected[8:20] = np.tile([1, 2, 3], 4)  # at distance 3, and then two literals
    expected[20:22] = 8, 9
    expected[30 : 30 + LONGEST_MATCH] = 7
    expected[30 + LONGEST_MATCH] = 6
    source = distances.tolist().index(3)
    steps = [skip(5, 3), match(source, 12, 2), skip(7, 1), match(1, 34, 0), skip(0, 1), skip(511), skip(0)]
    literals = bytes([1, 2, 3, 8, 9, 7, 255, 6])
    expected[29] = 7
    record = record_of(PREVIOUS, body(*steps, literals=literals))
    np.testing.assert_array_equal(decoded(codec, record, 0), expected)


@pytest.mark.skipif(not has_numba(), reason="needs numba")
@pytest.mark.parametrize("distance", range(1, 70))
@pytest.mark.parametrize("length", [3, 5, 8, 31, 33, 64, 65, 100, 200, LONGEST_MATCH])
def test_copies_at_all_distances_and_lengths(distance: int, length: int) -> None:
    codec = DeltaCodec(FrameSpec(500, np.dtype(np.uint8)), frames_per_record=1)
    codec.distances[5] = distance
    start = bytes(np.random.default_rng(distance).integers(1, 256, 100, dtype=np.uint8))
    long = length - 34
    literals = start[:63] + start[63:] + (bytes([long]) if long >= 0 else b"")
    record = record_of(PREVIOUS, body(skip(0, 63), skip(0, 37), match(5, min(length, 34)), literals=literals))
    np.testing.assert_array_equal(decoded(codec, record, 0), decoded_plainly(codec, record, 0))


def test_large_frames_have_longer_headers() -> None:
    assert header_bytes((1 << 14) - 1) == 2
    assert header_bytes(1 << 14) == 4


@pytest.mark.parametrize("row_bytes", [0, 1, 2, 3, 84, 288, 100_000])
@pytest.mark.parametrize("channels_last", [True, False])
def test_distances_differ_and_fit(row_bytes: int, channels_last: bool) -> None:
    distances = default_distances(FrameSpec(1, np.dtype(np.float32), 3, channels_last, row_bytes))
    assert len(set(distances.tolist())) == len(distances) == 32
    assert distances[0] == 0
    assert (distances[1:] > 0).all()


def filled_store(rng: np.random.Generator, size: int = 203) -> tuple[FrameStore, np.ndarray, np.ndarray]:
    """Two lanes with 40 observations of a stack of two frames each, which change a little, and where each begins."""
    layout = StackLayout((2, size), np.dtype(np.uint8), stack=2)
    store = FrameStore(DeltaCodec(layout.frame, frames_per_record=4), n_lanes=2, layout=layout)
    frames = rng.integers(0, 256, (41, 2, size), dtype=np.uint8)
    frames[1:] = np.where(rng.random(frames[1:].shape) < 0.02, frames[1:], frames[0])
    firsts = [
        store.append(np.arange(2), frames[t : t + 2].swapaxes(0, 1), lambda: np.zeros(2, dtype=np.int64)) - 2
        for t in range(40)
    ]
    return store, frames, np.array(firsts)


@given(st.integers(0, 2**32 - 1))
def test_any_two_runs_of_frames_are_gathered_together(seed: int) -> None:
    rng = np.random.default_rng(seed)
    store, frames, firsts = filled_store(rng)
    lanes, one, other = rng.integers(0, 2, 50), rng.integers(0, 40, 50), rng.integers(0, 40, 50)
    outs = [np.full((50, 2, store.codec.frame.nbytes), 99, dtype=np.uint8) for _ in range(2)]
    store.gather(lanes, np.stack([firsts[one, lanes], firsts[other, lanes]]), outs)
    for out, start in zip(outs, (one, other), strict=True):
        np.testing.assert_array_equal(out[:, 0], frames[start, lanes])
        np.testing.assert_array_equal(out[:, 1], frames[start + 1, lanes])


@given(st.integers(0, 2**32 - 1), st.sampled_from(["bytes", "lengths", "starts", "references"]))
def test_corrupt_stores_raise_or_decode_but_never_leave_their_memory(seed: int, what: str) -> None:
    rng = np.random.default_rng(seed)
    store, _, _ = filled_store(rng)
    if what == "bytes":
        store.arena.data[: store.arena.limit][rng.integers(0, store.arena.head, 20)] = rng.integers(0, 256, 20)
    else:
        index = getattr(store.index, what)
        index[rng.integers(0, 2, 3), rng.integers(0, index.shape[1], 3)] = rng.integers(0, 2**31, 3)
    lanes, first = np.repeat([0, 1], 39), np.tile(np.arange(39), 2) % (store.heads.min() - 2)
    guard = np.full((80, 2, store.codec.frame.nbytes), 99, dtype=np.uint8)
    outs = [guard[1:79], guard[1:79].copy()]
    with suppress(CorruptDataError):
        store.gather(lanes, np.stack([first, first + 1]), outs)
    assert (guard[0] == 99).all()
    assert (guard[-1] == 99).all()


def test_the_reference_frame_is_renewed_when_the_scene_changes_and_goes_with_its_last_record() -> None:
    rng = np.random.default_rng(0)
    codec = DeltaCodec(FrameSpec(400, np.dtype(np.uint8)), frames_per_record=2)
    references = []
    for scene in range(5):
        background = rng.integers(0, 256, 400, dtype=np.uint8)
        for _ in range(6):
            record = np.tile(background, 2)
            record[rng.integers(0, 800, 3)] = scene
            references.append(codec.encode(record[None], LANE).references)
    assert len(np.unique(references)) >= 4
    held = codec.reference_bytes
    for reference in references:
        codec.release(reference)
    for _ in range(50):  # numbers of frames that nobody uses any more are given out again
        codec.release(codec.encode(rng.integers(0, 256, (1, 800), dtype=np.uint8), LANE).references)
    assert codec.reference_bytes <= held


def test_the_state_says_which_format_the_records_have() -> None:
    spec = FrameSpec(64, np.dtype(np.uint8))
    for frames_per_record in (None, 3):
        options = {} if frames_per_record is None else {"frames_per_record": frames_per_record}
        for codec, group in ((DeltaCodec(spec, **options), 8), (DeltaWordsCodec(spec, **options), 16)):
            codec.encode(np.zeros((1, codec.record_bytes), np.uint8), LANE)
            restored = DeltaCodec(spec, **options).restored(unpickled(codec.state()))
            assert type(restored) is type(codec)
            assert restored.frames_per_record == (frames_per_record or group)


@pytest.mark.parametrize("distances", [np.zeros(32, np.int64), np.arange(1, 33), -np.arange(32)])
def test_impossible_distances_are_refused(distances: np.ndarray) -> None:
    spec = FrameSpec(64, np.dtype(np.uint8))
    state = {**DeltaCodec(spec).state(), "distances": distances}
    with pytest.raises(CorruptDataError, match="distances"):
        DeltaCodec(spec).restored(unpickled(state))


@pytest.mark.parametrize("frames_per_record", [0, -1, 5000])
def test_frames_per_record_has_limits(frames_per_record: int) -> None:
    with pytest.raises(ValueError, match="frames_per_record must be an integer from 1 to 1024"):
        DeltaCodec(FrameSpec(4, np.dtype(np.uint8)), frames_per_record=frames_per_record)


@pytest.mark.parametrize("is_shared", [False, True])
def test_reference_frames_stay_the_same_when_there_are_more(is_shared: bool) -> None:
    codec: Any = delta.DeltaCodec(FrameSpec(1000, np.dtype(np.uint8)))
    frames = np.random.default_rng(0).integers(0, 256, (300, 1000), dtype=np.uint8)
    earlier = []
    for number, frame in enumerate(frames, start=1):
        if is_shared:  # as by a thread that samples
            earlier.append((codec.reference_frames, codec.reference_frames[:number].copy()))
        assert codec.import_reference(frame) == number
    for number, frame in enumerate(frames, start=1):
        assert np.array_equal(codec.reference_content(number), frame)
    for array, copied in earlier:
        assert np.array_equal(array[: len(copied)], copied)
