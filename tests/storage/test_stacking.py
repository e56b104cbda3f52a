"""Frame stacks are found by looking at what moves, and cut and put together without loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.storage.stacking import StackLayout, declared_layout, detect_layout, n_changes
from tests.transitions import Stacked


def episode(observer: Any, steps: int = 40, reset_every: int = 15) -> np.ndarray:
    """``(steps, 1, *shape)``."""
    return np.stack([observer.reset() if step % reset_every == 0 else observer.step() for step in range(steps)])[
        :, None
    ]


def stacked(shape: tuple[int, ...], dtype: Any = np.uint8, **options: Any) -> Stacked:
    return Stacked(spaces.Box(0, 255, shape, dtype), np.random.default_rng(0), **options)


class TestDetection:
    @pytest.mark.parametrize("fill", ["zero", "repeat"])
    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize("axis", [0, -1])
    @pytest.mark.parametrize("depth", range(2, 17))
    def test_finds_every_stack(self, depth: int, axis: int, channels: int, fill: str) -> None:
        shape = (depth * channels, 6, 7) if axis == 0 else (6, 7, depth * channels)
        layout = detect_layout(episode(stacked(shape, depth=depth, axis=axis, fill=fill)))
        assert (layout.stack, layout.axis) == (depth, "first" if axis == 0 else "last")

    @pytest.mark.parametrize("dtype", [np.float32, np.int16, np.float64])
    def test_finds_stacks_of_every_dtype(self, dtype: Any) -> None:
        assert detect_layout(episode(stacked((4, 5, 5), dtype))).stack == 4

    def test_finds_stacks_of_vectors(self) -> None:
        assert detect_layout(episode(stacked((12,), np.float32, depth=3))).stack == 3

    def test_nan_equals_itself(self) -> None:
        observations = episode(stacked((4, 5, 5), np.float32, fill="repeat"))
        observations[..., 0, 0] = np.nan
        assert detect_layout(observations).stack == 4
        assert n_changes(np.full((5, 2, 3), np.nan)) == 0

    @pytest.mark.parametrize(
        "observations",
        [
            np.zeros((40, 2, 4, 5, 5), np.uint8),
            np.random.default_rng(0).integers(0, 256, size=(40, 2, 4, 5, 5), dtype=np.uint8),
            np.random.default_rng(0).normal(size=(40, 2, 8)).astype(np.float32),
            np.arange(40).reshape(40, 1, 1),
            np.zeros((1, 2, 4, 5, 5), np.uint8),
            np.zeros((0, 2, 4, 5, 5), np.uint8),
        ],
        ids=["constant", "noise", "vectors", "numbers", "one step", "no step"],
    )
    def test_finds_none_where_there_is_none(self, observations: np.ndarray) -> None:
        assert detect_layout(observations).stack == 1

    def test_finds_none_in_a_stack_that_moves_by_two(self) -> None:
        """But four frames that move by two are two pairs of frames that move by one."""
        assert detect_layout(episode(stacked((4, 6, 7), shift=2))).stack == 2
        assert detect_layout(episode(stacked((5, 6, 7), depth=5, shift=2))).stack == 1


@pytest.mark.parametrize(
    ("shape", "stack", "axis"),
    [
        ((4, 6, 7), 4, "first"),
        ((6, 7, 4), 4, "last"),
        ((12, 6, 7), 4, "first"),
        ((8, 8, 8), 4, "first"),
        ((9,), 3, "first"),
    ],
)
def test_a_declared_stack_is_along_the_axis_that_can_be_cut(shape: tuple[int, ...], stack: int, axis: str) -> None:
    layout = declared_layout(shape, np.dtype(np.uint8), stack)
    assert (layout.stack, layout.axis) == (stack, axis)


@pytest.mark.parametrize("shape", [(5, 6, 7), (), (3,)])
def test_a_declared_stack_that_cannot_be(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"frame_stack=4.*'auto' or None"):
        declared_layout(shape, np.dtype(np.uint8), 4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int16])
@pytest.mark.parametrize(
    ("shape", "stack", "axis"),
    [
        ((4, 6, 7), 4, "first"),
        ((6, 5, 7), 2, "first"),
        ((6, 7, 4), 2, "last"),
        ((6, 7, 4), 1, "last"),
        ((9,), 3, "first"),
    ],
)
def test_frames_put_together_again_are_the_observation(
    shape: tuple[int, ...], stack: int, axis: Any, dtype: Any, transposed: bool
) -> None:
    """Also where the memory of an image has its channels last, whatever its shape says."""
    layout = StackLayout(shape, np.dtype(dtype), stack, axis)
    observations = np.random.default_rng(0).integers(0, 100, size=(3, *shape)).astype(dtype)
    given = np.moveaxis(np.moveaxis(observations, 1, -1).copy(), -1, 1) if transposed else observations
    memory, form = layout.in_memory(given)
    items = memory.reshape(3, form.pixels, stack, form.chunk // form.item, form.item)
    frames = np.ascontiguousarray(items.transpose(0, 2, 3, 1, 4)).reshape(3, stack, layout.frame.nbytes)
    out = np.empty_like(observations)
    if layout.is_contiguous:
        out = frames.reshape(3, -1).view(dtype).reshape(observations.shape)
    else:
        layout.merge(frames, out)
    assert np.array_equal(out, observations)
