"""Observations that are hard on a buffer: scenes that change, scroll, repeat or are noise, all seeded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
from gymnasium import spaces

from tests.transitions import Observation, Transition, draw

SPACES: dict[str, spaces.Space] = {
    "stack": spaces.Box(0, 255, (4, 24, 23), np.uint8),
    "stack, channels last": spaces.Box(0, 255, (24, 23, 4), np.uint8),
    "stack of RGB": spaces.Box(0, 255, (9, 13, 14), np.uint8),
    "stack of RGB, channels last": spaces.Box(0, 255, (13, 14, 9), np.uint8),
    "RGB": spaces.Box(0, 255, (15, 13, 3), np.uint8),
    "RGB of tiles": spaces.Box(0, 255, (3, 22, 24), np.uint8),
    "tiny stack": spaces.Box(0, 255, (3, 5, 7), np.uint8),
    "uint16": spaces.Box(0, 65535, (2, 18, 17), np.uint16),
    "float images": spaces.Box(-np.inf, np.inf, (2, 12, 13), np.float32),
    "float64": spaces.Box(-np.inf, np.inf, (70,), np.float64),
    "int32": spaces.Box(-(2**31), 2**31 - 1, (150,), np.int32),
    "Discrete": spaces.Discrete(600),
    "MultiBinary": spaces.MultiBinary(11),
}
DICT_SPACES: dict[str, spaces.Dict] = {
    "Dict": spaces.Dict({"image": SPACES["stack"], "vector": SPACES["float64"], "bits": SPACES["MultiBinary"]}),
    "Dict of images": spaces.Dict({"left": SPACES["tiny stack"], "right": SPACES["RGB"], "number": SPACES["Discrete"]}),
}
GOALS: dict[str, spaces.Dict] = {
    "goals": spaces.Dict(
        {
            "observation": SPACES["stack"],
            "achieved_goal": spaces.Box(-np.inf, np.inf, (2,), np.float32),
            "desired_goal": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        }
    )
}
MOODS = ("calm", "calm", "calm", "scroll", "drift", "cuts", "noise", "still", "blank")
"""The state of a scene for a while. When it changes, the statistics of frames change at once."""
MOOD_CHANGES = 1 / 80
SURPRISES = 0.02
"""How often an observation does not continue the previous next observation."""
NEAR_MISSES = 0.03
"""How often an observation differs from the expected one in a single number."""
STEPS_PER_ODD_ACTION = 300
"""Once in so many steps, an action is outside its space."""


class Scenes:
    """Stacked pictures: ``depth`` frames along the first or last axis, padded after a reset."""

    def __init__(self, space: spaces.Box, rng: np.random.Generator) -> None:
        self.dtype, self.rng = np.dtype(space.dtype), rng
        self.axis = 0 if space.shape[0] <= space.shape[-1] else -1
        size = space.shape[self.axis]
        self.depth = self._depth(size)
        self.frame_shape = list(space.shape)
        self.frame_shape[self.axis] //= self.depth
        self.fill = str(rng.choice(["zeros", "first frame"]))
        self.mood = "calm"
        self.colours = int(rng.choice([4, 40, 256]))
        self._cut()
        self.reset()

    def _depth(self, size: int) -> int:
        return 1 if size == 3 and self.axis == -1 else size if size < 6 else size // 3

    def reset(self) -> Observation:
        frame = self._next_frame()
        oldest = np.zeros_like(frame) if self.fill == "zeros" else frame
        self.frames = [oldest] * (self.depth - 1) + [frame]
        return np.concatenate(self.frames, axis=self.axis)

    def step(self) -> Observation:
        if self.rng.random() < MOOD_CHANGES:
            self.mood = str(self.rng.choice(MOODS))
        if self.mood != "still":
            self.frames = [*self.frames[1:], self._next_frame()]
        observation = np.concatenate(self.frames, axis=self.axis)
        return near_miss(observation, self.rng) if self.rng.random() < NEAR_MISSES else observation

    def _next_frame(self) -> np.ndarray:
        rng = self.rng
        if self.mood == "blank":
            return np.zeros(self.frame_shape, self.dtype)
        if self.mood == "noise":
            return self._random(self.frame_shape)
        if rng.random() < (0.3 if self.mood == "cuts" else 0.01):
            self._cut()
        elif self.mood == "scroll":
            self.scene = np.roll(self.scene, int(rng.integers(1, 4)), axis=1)
        elif self.mood == "drift":
            flat = self.scene.reshape(-1)
            start = int(rng.integers(flat.size))
            flat[start : start + flat.size // 20] = self._random(flat[start : start + flat.size // 20].shape)
        frame = self.scene.copy()
        flat = frame.reshape(-1)
        at = int(rng.integers(flat.size))
        flat[at : at + int(rng.integers(1, 12))] = self._random(())
        return frame

    def _cut(self) -> None:
        self.scene = self._random(self.frame_shape)
        if self.rng.random() < 0.5:  # large areas of one colour
            self.scene.reshape(-1)[: self.scene.size * 3 // 4] = self._random(())

    def _random(self, shape: Any) -> np.ndarray:
        if self.dtype.kind == "f":
            return self.rng.integers(-9, 9, shape).astype(self.dtype) / 4
        return self.rng.integers(0, self.colours if self.dtype == np.uint8 else 60000, shape).astype(self.dtype)


class Tiles(Scenes):
    """RGB images, channels first, of tiles, some of which are equal."""

    def _depth(self, size: int) -> int:
        return 1

    def _cut(self) -> None:
        tiles = self._random((int(self.rng.integers(1, 5)), 3, 5, 7))
        n_rows, n_columns = -(-self.frame_shape[1] // 5), -(-self.frame_shape[2] // 7)
        chosen = tiles[self.rng.integers(len(tiles), size=(n_rows, n_columns))]
        whole = chosen.transpose(2, 0, 3, 1, 4).reshape(3, 5 * n_rows, 7 * n_columns)
        self.scene = whole[:, : self.frame_shape[1], : self.frame_shape[2]].copy()


class Vectors:
    """Numbers of any kind. Floats have random bits, including negative zeros and NaNs with payloads."""

    def __init__(self, space: spaces.Space, rng: np.random.Generator) -> None:
        self.space, self.rng = space, rng
        self.finite = isinstance(space, spaces.Box) and space.shape == (2,)
        self.reset()

    def reset(self) -> Observation:
        if isinstance(self.space, spaces.Box) and not self.finite:
            dtype = np.dtype(self.space.dtype)
            bits = self.rng.bytes(dtype.itemsize * int(np.prod(self.space.shape)))
            self.now = np.frombuffer(bits, dtype).reshape(self.space.shape).copy()
            self.now.reshape(-1)[0] = -0.0 if dtype.kind == "f" else 0
        elif self.finite:
            self.now = self.rng.integers(0, 3, self.space.shape).astype(self.space.dtype)
        else:
            self.now = np.asarray(draw(self.space, self.rng))
        return self.now.copy()

    def step(self) -> Observation:
        chance = self.rng.random()
        if chance < 0.2 or self.now.ndim == 0:
            return self.reset()
        if chance < 0.7 and self.now.size > 20:
            at = int(self.rng.integers(self.now.size))
            self.now.reshape(-1)[at] = self.now.reshape(-1)[at - 1]
        return self.now.copy()


class Parts:
    """A Dict space with a separate world for each key."""

    def __init__(self, space: spaces.Dict, rng: np.random.Generator) -> None:
        self.parts = {key: world_of(part, rng) for key, part in space.spaces.items()}

    def reset(self) -> Observation:
        return {key: part.reset() for key, part in self.parts.items()}

    def step(self) -> Observation:
        return {key: part.step() for key, part in self.parts.items()}


def near_miss(observation: Observation, rng: np.random.Generator) -> Observation:
    """A copy of an observation in which one number differs: the first, the last, or any other."""
    if isinstance(observation, dict):
        key = str(rng.choice(list(observation)))
        return {**observation, key: near_miss(observation[key], rng)}
    other = observation.copy()
    bits = other.reshape(-1).view(np.uint8).reshape(other.size, -1)
    bits[int(rng.choice([0, -1, int(rng.integers(other.size))])), 0] ^= 1
    return other


def world_of(space: spaces.Space, rng: np.random.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        return Parts(space, rng)
    if isinstance(space, spaces.Box) and len(space.shape) == 3:
        return (Tiles if space == SPACES["RGB of tiles"] else Scenes)(space, rng)
    return Vectors(space, rng)


def transitions(
    space: spaces.Space, action_space: spaces.Space, n_envs: int, rng: np.random.Generator, longest: int
) -> Iterator[Transition]:
    """Endless steps of environments with episodes of different lengths: some have only one step.

    :param longest: The length of the longest episodes.
    """
    worlds = [world_of(space, rng) for _ in range(n_envs)]
    ends = rng.choice([1.0, 0.2, 0.05, 0.005], n_envs, p=[0.1, 0.2, 0.4, 0.3])
    now, ages = [world.reset() for world in worlds], np.zeros(n_envs, dtype=np.int64)
    for number in count():
        reached = [world.step() for world in worlds]
        ages += 1
        done = (rng.random(n_envs) < ends) | (ages >= longest)
        truncated = done & (rng.random(n_envs) < 0.5)
        ages[done] = 0
        yield Transition(
            batch(now),
            batch(reached),
            actions_of(action_space, n_envs, rng, number),
            rng.normal(size=n_envs).astype(np.float32),
            done,
            [{"TimeLimit.truncated": True} if cut else {} for cut in truncated],
        )
        fresh = done | (rng.random(n_envs) < SURPRISES)
        now = [world.reset() if new else obs for world, new, obs in zip(worlds, fresh, reached, strict=True)]
        for env in np.flatnonzero(~fresh & (rng.random(n_envs) < NEAR_MISSES)).tolist():
            now[env] = near_miss(now[env], rng)


def actions_of(space: spaces.Space, n_envs: int, rng: np.random.Generator, number: int) -> np.ndarray:
    """Actions of a step. A few integers are outside their space, because SB3 stores any."""
    actions = np.stack([draw(space, rng) for _ in range(n_envs)])
    turn, steps = divmod(number, STEPS_PER_ODD_ACTION)
    if actions.dtype == np.int64 and steps == STEPS_PER_ODD_ACTION - 1:
        actions[-1] = (256, -7, 1 << 40)[turn % 3]
    return actions


def batch(observations: list[Observation]) -> Observation:
    if isinstance(observations[0], dict):
        return {key: np.stack([observation[key] for observation in observations]) for key in observations[0]}
    return np.stack(observations)
