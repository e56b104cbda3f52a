"""Stacks of every kind, and content that only looks like one, are sampled as SB3's buffer samples them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from tests.compressed.pairs import IMAGES, LOOK_AFTER, check_replay, recorded, replay_pair
from tests.methods import installed
from tests.transitions import Stacked, Transition, draw, play


class TestFrameStacks:
    @pytest.mark.parametrize("fill", ["zero", "repeat"])
    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize("axis", [0, -1])
    @pytest.mark.parametrize("depth", [2, 3, 4, 16])
    def test_of_every_kind(self, depth: int, axis: int, channels: int, fill: str) -> None:
        shape = [6, 7]
        shape.insert(len(shape) if axis else 0, depth * channels)
        check_stacks(spaces.Box(0, 255, tuple(shape), np.uint8), depth=depth, axis=axis, fill=fill)

    @pytest.mark.parametrize("dtype", [np.float32, np.int16, np.float64])
    @pytest.mark.parametrize("axis", [0, -1])
    def test_of_other_dtypes(self, dtype: Any, axis: int) -> None:
        shape = (3, 5, 6) if axis == 0 else (5, 6, 3)
        check_stacks(spaces.Box(-100, 100, shape, dtype), depth=3, axis=axis)

    def test_of_vectors(self) -> None:
        check_stacks(spaces.Box(-np.inf, np.inf, (12,), np.float32), depth=4, axis=0)

    @pytest.mark.parametrize("frame_stack", [None, 1, 2, 4, 8])
    @pytest.mark.parametrize("shape", [(8, 6, 7), (6, 7, 8)], ids=["first", "last"])
    @pytest.mark.parametrize("method", ["rle", "delta"])
    def test_declared_rightly_or_wrongly(self, method: str, shape: tuple[int, ...], frame_stack: int | None) -> None:
        axis = 0 if shape[0] == 8 else -1
        space = spaces.Box(0, 255, shape, np.uint8)
        check_stacks(space, depth=4, axis=axis, compression_method=method, frame_stack=frame_stack)


def check_stacks(space: spaces.Box, depth: int, axis: int, fill: str = "zero", **options: Any) -> None:
    def observer(space: spaces.Box, rng: np.random.Generator) -> Stacked:
        return Stacked(space, rng, depth, axis, fill)

    transitions = list(itertools.islice(play(space, 2, make_observer=observer), LOOK_AFTER[-1]))
    check_replay(replay_pair(space, 2, **options), transitions)


class Constant:
    """Nothing ever changes."""

    def __init__(self, space: spaces.Box, rng: np.random.Generator) -> None:
        self.frame = np.full(space.shape, 7, space.dtype)

    def reset(self) -> np.ndarray:
        return self.frame

    step = reset


class ThenMoving(Constant):
    """Nothing changes until long after the buffer has decided how to store it."""

    def __init__(self, space: spaces.Box, rng: np.random.Generator) -> None:
        super().__init__(space, rng)
        self.moving, self.steps = Stacked(space, rng), 0

    def step(self) -> np.ndarray:
        self.steps += 1
        return self.frame if self.steps < 30 else self.moving.step()


class OneFrameRepeated:
    """A stack of one and the same frame, another one in each step."""

    def __init__(self, space: spaces.Box, rng: np.random.Generator) -> None:
        self.space, self.rng = space, rng

    def reset(self) -> np.ndarray:
        frame = draw(spaces.Box(0, 255, self.space.shape[1:], np.uint8), self.rng)
        return np.stack([frame] * self.space.shape[0])

    step = reset


class BackAndForth:
    """Two frames in turns, so that a stack equals the one two steps ago."""

    def __init__(self, space: spaces.Box, rng: np.random.Generator) -> None:
        self.frames = [draw(space, rng)[0] for _ in range(2)]
        self.depth, self.steps = space.shape[0], 0

    def reset(self) -> np.ndarray:
        self.steps += 1
        return np.stack([self.frames[(self.steps + i) % 2] for i in range(self.depth)])

    step = reset


class NewestFirst(Stacked):
    """A stack in the wrong order: the newest frame comes first."""

    def _observe(self) -> np.ndarray:
        return super()._observe()[::-1].copy()


MISLEADING: dict[str, Callable[..., Any]] = {
    "constant": Constant,
    "constant, then moving": ThenMoving,
    "one frame repeated": OneFrameRepeated,
    "two frames in turns": BackAndForth,
    "newest frame first": NewestFirst,
    "shifted by two": functools.partial(Stacked, shift=2),
    "shifted by a whole stack": functools.partial(Stacked, shift=4),
}


@functools.cache
def misleading(content: str) -> list[Transition]:
    return list(itertools.islice(play(IMAGES, 2, make_observer=MISLEADING[content]), LOOK_AFTER[-1]))


@pytest.mark.parametrize("frame_stack", ["auto", None, 4])
@pytest.mark.parametrize("method", installed("rle", "delta", "zstd-dict/3", "auto"))
class TestMisleadingContent:
    @pytest.mark.parametrize("content", MISLEADING)
    def test_of_frames(self, content: str, method: str, frame_stack: Any) -> None:
        self.check(misleading(content), method, frame_stack)

    def test_of_an_environment_that_is_reset_in_every_step(self, method: str, frame_stack: Any) -> None:
        self.check(play(IMAGES, 2, episode_end=3), method, frame_stack)

    def test_of_environments_that_are_all_the_same(self, method: str, frame_stack: Any) -> None:
        transitions = (
            Transition(*(np.repeat(part, 2, axis=0) for part in transition[:-1]), transition.infos * 2)
            for transition in recorded("channels first", 1)
        )
        self.check(transitions, method, frame_stack)

    @staticmethod
    def check(transitions: Iterable[Transition], method: str, frame_stack: Any) -> None:
        buffers = replay_pair(IMAGES, 2, compression_method=method, frame_stack=frame_stack)
        check_replay(buffers, itertools.islice(transitions, LOOK_AFTER[-1]))
