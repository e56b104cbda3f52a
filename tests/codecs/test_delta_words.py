"""``delta`` of earlier versions: compiled and plain form are equal, and no bytes make it read or write elsewhere."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.codecs.base import FrameSpec
from sb3_extra_buffers.codecs.delta_words import DeltaWordsCodec, decode_numpy, encode_numpy
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.stacking import StackLayout

KERNELS = "sb3_extra_buffers.codecs.delta_words_kernels"


@st.composite
def records(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Records of frames that stay, change a little, turn to zeros, return to the reference, or are something new."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_words, group = draw(st.sampled_from([1, 2, 255, 256, 257, 700, 1300])), draw(st.integers(1, 6))
    frame_bytes = 4 * n_words - draw(st.integers(0, 3))
    bases = rng.integers(0, 2**32, (2, n_words), dtype=np.uint32)
    words = np.repeat(bases[:, None], group, axis=1)
    for record in words:
        for i, frame in enumerate(record):
            kind = draw(st.sampled_from(["same", "few", "few", "zeros", "nearly zeros", "reference", "noise"]))
            frame[:] = record[i - 1] if i and kind in ("same", "few") else frame
            if kind.endswith("zeros"):
                frame[:] = 0
            if kind in ("few", "nearly zeros"):
                frame[rng.integers(0, n_words, rng.integers(0, 12))] = rng.integers(0, 2**32)
            if kind == "noise":
                frame[:] = rng.integers(0, 2**32, n_words)
    for array in (words, bases):
        array.view(np.uint8).reshape(-1, 4 * n_words)[:, frame_bytes:] = 0
    return words, bases, frame_bytes


@pytest.mark.skipif(not has_numba(), reason="needs numba")
@given(records())
def test_compiled_encoding_equals_the_reference_byte_for_byte(case: tuple[np.ndarray, np.ndarray, int]) -> None:
    kernels = load_kernels(KERNELS)
    assert kernels is not None
    words, bases, frame_bytes = case
    data, lengths = encode_numpy(words, bases, frame_bytes)
    out = np.empty(words.size * 4, dtype=np.uint8)
    compiled_lengths = np.empty(len(words), dtype=np.int64)
    size = kernels.encode(words, bases, frame_bytes, out, compiled_lengths)
    np.testing.assert_array_equal(compiled_lengths, lengths)
    np.testing.assert_array_equal(out[:size], data)


@given(records())
def test_the_reference_decodes_what_it_encoded(case: tuple[np.ndarray, np.ndarray, int]) -> None:
    words, bases, frame_bytes = case
    data, lengths = encode_numpy(words, bases, frame_bytes)
    group = words.shape[1]
    for record, base, payload in zip(words, bases, np.split(data, np.cumsum(lengths)[:-1]), strict=True):
        expected = record.view(np.uint8)[:, :frame_bytes]
        if len(payload) < group * frame_bytes:
            np.testing.assert_array_equal(decode_numpy(payload, base, group, frame_bytes), expected)
        else:
            np.testing.assert_array_equal(payload, expected.reshape(-1))


def filled_store(rng: np.random.Generator, size: int = 203) -> tuple[FrameStore, np.ndarray, np.ndarray]:
    """Two lanes with 40 observations of a stack of two frames each, which change a little, and where each begins."""
    layout = StackLayout((2, size), np.dtype(np.uint8), stack=2)
    store = FrameStore(DeltaWordsCodec(layout.frame, frames_per_record=4), n_lanes=2, layout=layout)
    frames = rng.integers(0, 256, (41, 2, size), dtype=np.uint8)
    frames[1:] = np.where(rng.random(frames[1:].shape) < 0.02, frames[1:], frames[0])
    firsts = [
        store.append(np.arange(2), frames[t : t + 2].swapaxes(0, 1), lambda: np.zeros(2, dtype=np.int64)) - 2
        for t in range(40)
    ]
    return store, frames, np.array(firsts)


def gather(store: FrameStore, lanes: np.ndarray, first: np.ndarray, second: np.ndarray) -> list[np.ndarray]:
    outs = [np.full((len(lanes), 2, store.codec.frame.nbytes), 99, dtype=np.uint8) for _ in range(2)]
    store.gather(lanes, np.stack([first, second]), outs)
    return outs


@given(st.integers(0, 2**32 - 1))
def test_any_two_runs_of_frames_are_gathered_together(seed: int) -> None:
    rng = np.random.default_rng(seed)
    store, frames, firsts = filled_store(rng)
    lanes, one, other = rng.integers(0, 2, 50), rng.integers(0, 40, 50), rng.integers(0, 40, 50)
    gathered = gather(store, lanes, firsts[one, lanes], firsts[other, lanes])
    for out, start in zip(gathered, (one, other), strict=True):
        np.testing.assert_array_equal(out[:, 0], frames[start, lanes])
        np.testing.assert_array_equal(out[:, 1], frames[start + 1, lanes])


@given(st.integers(0, 2**32 - 1), st.sampled_from(["bytes", "lengths", "starts", "references"]))
def test_corrupt_stores_raise_or_decode_but_never_leave_their_memory(seed: int, what: str) -> None:
    rng = np.random.default_rng(seed)
    store, _, _ = filled_store(rng)
    if what == "bytes":
        used = store.arena.data[: store.arena.limit]
        places = rng.integers(0, store.arena.head, 20)
        used[places] = rng.integers(0, 256, 20)
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
    frame = FrameSpec(400, np.dtype(np.uint8))
    codec = DeltaWordsCodec(frame, frames_per_record=2)
    lane, references = np.zeros(1, dtype=np.int64), []
    for scene in range(5):
        background = rng.integers(0, 256, 400, dtype=np.uint8)
        for _ in range(6):
            record = np.tile(background, 2)
            record[rng.integers(0, 800, 3)] = scene
            references.append(codec.encode(record[None], lane).references)
    assert len(np.unique(references)) >= 4
    held = codec.reference_bytes
    for reference in references:
        codec.release(reference)
    for _ in range(50):  # numbers of frames that nobody uses any more are given out again
        codec.release(codec.encode(rng.integers(0, 256, (1, 800), dtype=np.uint8), lane).references)
    assert codec.reference_bytes <= held


@pytest.mark.parametrize("frames_per_record", [0, -1, 5000])
def test_frames_per_record_has_limits(frames_per_record: int) -> None:
    with pytest.raises(ValueError, match="frames_per_record must be an integer from 1 to 1024"):
        DeltaWordsCodec(FrameSpec(4, np.dtype(np.uint8)), frames_per_record=frames_per_record)
