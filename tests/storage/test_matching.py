"""What is new in an observation: the compiled code and the plain one find the same, and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.storage.matching import NewestObservations, _masks, append_new_frames
from sb3_extra_buffers.storage.stacking import MemoryForm

needs_numba = pytest.mark.skipif(not has_numba(), reason="needs numba")


@st.composite
def streams(draw: st.DrawFn) -> tuple[MemoryForm, int, np.ndarray]:
    """A form of observations, a stack, and ``(steps, lanes, bytes)`` of observations that often continue each other."""
    item = draw(st.sampled_from([1, 2, 4, 8]))
    chunk = item * draw(st.integers(1, 3))
    pixels = draw(st.sampled_from([1, 1, 2, 5, 16, 33]))
    if pixels == 1:
        chunk = item = draw(st.sampled_from([1, 3, 7, 8, 16, 40]))
    stack = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    n_lanes, n_values = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 256]))
    now = np.zeros((n_lanes, pixels, stack, chunk), np.uint8)
    steps = []
    for shift in draw(st.lists(st.integers(0, 5), min_size=1, max_size=12)):
        for _ in range(shift):
            frame = rng.integers(0, n_values, size=(n_lanes, pixels, 1, chunk), dtype=np.uint8)
            now = np.concatenate([now[:, :, 1:], frame], axis=2)
        if shift == 5:
            now = np.where(rng.random((n_lanes, 1, 1, 1)) < 0.5, now[:, :, ::-1], now)
        steps.append(now.reshape(n_lanes, -1))
    return MemoryForm(pixels, chunk, item), stack, np.stack(steps)


@needs_numba
@given(stream=streams())
def test_compiled_and_plain_code_agree(stream: tuple[MemoryForm, int, np.ndarray]) -> None:
    form, stack, steps = stream
    n_lanes, size = steps.shape[1:]
    states = [
        {
            "newest": np.zeros((n_lanes, size), np.uint8),
            "known": np.zeros(n_lanes, np.bool_),
            "ring": np.zeros((n_lanes, 2 * stack, size // stack), np.uint8),
            "heads": np.zeros(n_lanes, np.int64),
            "encoded": np.zeros(n_lanes, np.int64),
            "ends": np.zeros((1, n_lanes), np.int64),
        }
        for _ in range(2)
    ]
    compiled = load_kernels("sb3_extra_buffers.storage.matching_kernels").append_new_frames
    for step, memory in enumerate(steps):
        lanes = np.roll(np.arange(n_lanes), step)
        waiting = [
            function(lanes, memory[lanes], memory[lanes], *form, stack, _masks(form, stack), *state.values())
            for function, state in zip((append_new_frames, compiled), states, strict=True)
        ]
        assert waiting[0] == waiting[1]
        for name in states[0]:
            assert np.array_equal(states[0][name], states[1][name]), name


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_numba)])
@given(stream=streams())
def test_the_ring_holds_the_frames_of_every_observation(
    compiled: bool, stream: tuple[MemoryForm, int, np.ndarray]
) -> None:
    form, stack, steps = stream
    n_lanes, size = steps.shape[1:]
    newest = NewestObservations(n_lanes, stack)
    ring = np.zeros((n_lanes, (len(steps) + 1) * stack, size // stack), np.uint8)
    heads, encoded = np.zeros(n_lanes, np.int64), np.zeros(n_lanes, np.int64)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr("sb3_extra_buffers.storage.matching.load_kernels", lambda module: None)
        ends = [newest.append(np.arange(n_lanes), (memory,), form, ring, heads, encoded)[0][0] for memory in steps]
    for memory, end in zip(steps, ends, strict=True):
        frames = memory.reshape(n_lanes, form.pixels, stack, form.chunk // form.item, form.item)
        frames = frames.transpose(0, 2, 3, 1, 4).reshape(n_lanes, stack, -1)
        for lane in range(n_lanes):
            assert np.array_equal(ring[lane, end[lane] - stack : end[lane]], frames[lane])


def test_only_new_frames_take_room() -> None:
    newest = NewestObservations(1, stack=4)
    ring, heads, encoded = np.zeros((1, 40, 2), np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64)
    form = MemoryForm(1, 2, 2)
    taken = []
    for frames in ([0, 0, 0, 1], [0, 0, 1, 2], [0, 0, 1, 2], [1, 2, 3, 4], [9, 9, 9, 9], [9, 9, 9, 9], [9, 9, 9, 8]):
        before = int(heads[0])
        newest.append(np.array([0]), (np.repeat(np.uint8(frames), 2)[None],), form, ring, heads, encoded)
        taken.append(int(heads[0]) - before)
    assert taken == [4, 1, 0, 2, 4, 0, 1]


@needs_numba
@given(st.integers(0, 10_000), st.sampled_from([2, 511, 512, 513, 1300]))
def test_pairs_of_four_gray_frames_are_told_apart_as_by_plain_code(seed: int, pixels: int) -> None:
    """The kernel has a pass of its own for them, which must notice when a step is not the usual one."""
    rng = np.random.default_rng(seed)
    form, n_lanes, stack = MemoryForm(pixels, 1, 1), 2, 4
    now = rng.integers(0, 3, (n_lanes, pixels, stack), dtype=np.uint8)
    states = [
        {
            "newest": np.zeros((n_lanes, 4 * pixels), np.uint8),
            "known": np.zeros(n_lanes, np.bool_),
            "ring": np.zeros((n_lanes, 200, pixels), np.uint8),
            "heads": np.zeros(n_lanes, np.int64),
            "encoded": np.zeros(n_lanes, np.int64),
            "ends": np.zeros((2, n_lanes), np.int64),
        }
        for _ in range(2)
    ]
    compiled = load_kernels("sb3_extra_buffers.storage.matching_kernels").append_new_frames
    for _ in range(15):
        before = now.copy()
        for lane in range(n_lanes):
            for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 4])):
                frame = now[lane, :, -1:].copy()
                frame[rng.integers(pixels)] += 1
                now[lane] = np.concatenate([now[lane, :, 1:], frame], axis=1)
        after = now.copy()
        if rng.random() < 0.3:  # something else than the usual step, often in one pixel only
            changed = before if rng.random() < 0.5 else after
            changed[rng.integers(n_lanes), rng.integers(pixels), rng.integers(4)] += 1
        pair = tuple(part.reshape(n_lanes, -1) for part in (before, after))
        waiting = [
            function(np.arange(n_lanes), *pair, *form, stack, _masks(form, stack), *state.values())
            for function, state in zip((append_new_frames, compiled), states, strict=True)
        ]
        assert waiting[0] == waiting[1]
        plain, fast = states
        for name in ("newest", "known", "heads", "ends"):
            assert np.array_equal(plain[name], fast[name]), name
        for lane, head in enumerate(plain["heads"].tolist()):
            assert np.array_equal(plain["ring"][lane, :head], fast["ring"][lane, :head])
