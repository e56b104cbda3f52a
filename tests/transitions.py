"""Transitions as SB3 hands them to a buffer, made from simulated observations of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer, RolloutBuffer

Observation = Any
"""An array, or a dict of arrays."""


class Transition(NamedTuple):
    obs: Observation
    next_obs: Observation
    action: np.ndarray
    reward: np.ndarray
    done: np.ndarray
    infos: list[dict[str, Any]]


class Sampled:
    """Observations drawn from a space. Some stay the same for a step, as in an environment where nothing happens."""

    def __init__(self, space: spaces.Space, rng: np.random.Generator) -> None:
        self.space, self.rng = space, rng
        self.now = draw(space, rng)

    def reset(self) -> Observation:
        self.now = draw(self.space, self.rng)
        return self.now

    def step(self) -> Observation:
        return self.now if self.rng.random() < 0.2 else self.reset()


class Stacked:
    """A stack of images in which a few pixels change per step.

    :param axis: Where the frames are stacked: 0 or -1.
    :param fill: What a stack is filled with after a reset, ``"zero"`` or the first frame, ``"repeat"``.
    :param shift: By how many frames the stack moves in a step.
    """

    def __init__(
        self,
        space: spaces.Box,
        rng: np.random.Generator,
        depth: int = 4,
        axis: int = 0,
        fill: str = "zero",
        shift: int = 1,
    ) -> None:
        self.space, self.rng = space, rng
        self.depth, self.axis, self.fill, self.shift = depth, axis, fill, shift
        shape = list(space.shape)
        shape[axis] //= depth
        self.background = draw(spaces.Box(space.low.min(), space.high.max(), tuple(shape), space.dtype), rng)
        self.reset()

    def reset(self) -> Observation:
        frame = self._next_frame()
        oldest = frame if self.fill == "repeat" else np.zeros_like(frame)
        self.frames = [oldest] * (self.depth - 1) + [frame]
        return self._observe()

    def step(self) -> Observation:
        for _ in range(self.shift):
            self.frames = [*self.frames[1:], self._next_frame()]
        return self._observe()

    def _next_frame(self) -> np.ndarray:
        frame = self.background.copy()
        changes = self.rng.integers(0, frame.size, size=3)
        frame.reshape(-1)[changes] = self.rng.integers(0, 100, size=3)
        return frame

    def _observe(self) -> np.ndarray:
        return np.concatenate(self.frames, axis=self.axis)


class Parts:
    """A Dict space: an observer for each key."""

    def __init__(self, space: spaces.Dict, rng: np.random.Generator) -> None:
        self.parts = {key: observer_for(part, rng) for key, part in space.spaces.items()}

    def reset(self) -> Observation:
        return {key: part.reset() for key, part in self.parts.items()}

    def step(self) -> Observation:
        return {key: part.step() for key, part in self.parts.items()}


def observer_for(space: spaces.Space, rng: np.random.Generator) -> Any:
    """Stacks for images, whose smallest axis is taken for the stack, and draws from the space for everything else."""
    if isinstance(space, spaces.Dict):
        return Parts(space, rng)
    if isinstance(space, spaces.Box) and len(space.shape) == 3:
        axis = 0 if space.shape[0] < space.shape[2] else -1
        return Stacked(space, rng, depth=space.shape[axis], axis=axis)
    return Sampled(space, rng)


def draw(space: spaces.Space, rng: np.random.Generator) -> Observation:
    """A random element of a space, the same for the same generator on every version of gymnasium."""
    if isinstance(space, spaces.Discrete):
        return np.array(space.start + rng.integers(space.n), dtype=space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return rng.integers(space.nvec).astype(space.dtype)
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(0, 2, size=space.shape).astype(space.dtype)
    assert isinstance(space, spaces.Box)
    if space.dtype.kind == "f":
        return rng.normal(size=space.shape).astype(space.dtype)
    low, high = int(space.low.min()), int(space.high.max())
    return rng.integers(low, high, size=space.shape, endpoint=True, dtype=space.dtype)


def play(
    space: spaces.Space,
    n_envs: int = 1,
    seed: int = 0,
    make_observer: Callable[..., Any] = observer_for,
    action_space: spaces.Space | None = None,
    episode_end: float = 0.1,
    surprise: float = 0.05,
) -> Iterator[Transition]:
    """Endless transitions: episodes that terminate or are truncated, and now and then an observation out of the blue.

    :param episode_end: How likely an episode ends in a step. The next observation is then the last one of the episode.
    :param surprise: How likely the next observation is not the one that the next step starts from.
    """
    rng = np.random.default_rng(seed)
    action_space = action_space or spaces.Discrete(5)
    observers = [make_observer(space, rng) for _ in range(n_envs)]
    now = [observer.reset() for observer in observers]
    while True:
        reached = [observer.step() for observer in observers]
        terminated = rng.random(n_envs) < episode_end / 2
        truncated = ~terminated & (rng.random(n_envs) < episode_end / 2)
        done = terminated | truncated
        fresh = done | (rng.random(n_envs) < surprise)
        yield Transition(
            _batch(now),
            _batch(reached),
            np.stack([draw(action_space, rng) for _ in range(n_envs)]),
            rng.normal(size=n_envs).astype(np.float32),
            done,
            [{"TimeLimit.truncated": True} if cut else {} for cut in truncated],
        )
        now = [observer.reset() if new else obs for observer, new, obs in zip(observers, fresh, reached, strict=True)]


def _batch(observations: list[Observation]) -> Observation:
    if isinstance(observations[0], dict):
        return {key: np.stack([observation[key] for observation in observations]) for key in observations[0]}
    return np.stack(observations)


def add_to_replay(buffers: list[ReplayBuffer], transition: Transition) -> None:
    for buffer in buffers:
        buffer.add(*copied(transition))


def add_to_rollout(buffers: list[RolloutBuffer], transition: Transition) -> None:
    value, log_prob = th.tensor(transition.reward * 2), th.tensor(transition.reward - 1)
    for buffer in buffers:
        obs, _, action, reward, done, _ = copied(transition)
        buffer.add(obs, action, reward, done, value, log_prob)


def copied(transition: Transition) -> Transition:
    """SB3's Dict buffers change the dicts that they are given."""

    def copy(part: Any) -> Any:
        return {key: value.copy() for key, value in part.items()} if isinstance(part, dict) else part.copy()

    return Transition(*map(copy, transition[:-1]), transition.infos)


def sample_both(expected: BaseBuffer, actual: BaseBuffer, batch_size: int, seed: int, env: Any = None) -> None:
    """Sample from both under one seed, and check that the batches are the same."""
    np.random.seed(seed)
    right = expected.sample(batch_size, env)
    np.random.seed(seed)
    assert_same(actual.sample(batch_size, env), right)


def assert_same(actual: Any, expected: Any) -> None:
    """Equal to the last bit, and of equal type, shape, dtype and device all the way down."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, th.Tensor):
        assert actual.device == expected.device
        assert_same(actual.cpu().numpy(), expected.cpu().numpy())
    elif isinstance(expected, np.ndarray):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        if actual.tobytes() != expected.tobytes():
            np.testing.assert_array_equal(actual, expected)
            raise AssertionError("The values are equal, but not their bits.")
    else:
        assert actual == expected
