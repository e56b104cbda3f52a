"""What the tests of several buffer classes share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv

from tests.environments import SpaceEnv
from tests.transitions import Transition, assert_same, play

METHODS = ["none", "delta", "zstd-3"]
STACK = spaces.Box(0, 255, (4, 8, 9), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
DICT = spaces.Dict({"image": STACK, "vector": VECTOR})
VECTORS = spaces.Dict({"floats": VECTOR, "bits": spaces.MultiBinary(5)})
"""A Dict space that is quick to learn from."""
SLOTS = 40
"""More than the steps after which a buffer decides how to store observations."""


def transitions(space: spaces.Space, count: int, n_envs: int = 1, **kwargs: Any) -> Iterator[Transition]:
    return itertools.islice(play(space, n_envs, **kwargs), count)


def small_net(**kwargs: Any) -> dict[str, Any]:
    """A fresh dict every time: SB3 writes into the one that it is given."""
    return {"net_arch": [8], **kwargs}


def vec_env(space: spaces.Space, n_envs: int = 1, **kwargs: Any) -> DummyVecEnv:
    env = DummyVecEnv([lambda: SpaceEnv(space, **kwargs)] * n_envs)
    env.seed(3)
    return env


def assert_same_training(
    make_expected: Callable[[], BaseAlgorithm], make_actual: Callable[[], BaseAlgorithm], steps: int
) -> None:
    """Train both, and check that every weight is the same to the last bit."""
    before, expected = _train(make_expected, steps)
    _, actual = _train(make_actual, steps)
    assert_same(actual, expected)
    assert any(not th.equal(before[key], expected[key]) for key in before), "Nothing was learnt, so nothing was tested."


def _train(make_model: Callable[[], BaseAlgorithm], steps: int) -> list[dict[str, th.Tensor]]:
    """The weights before and after. Models share one generator, so each is made and trained before the next."""
    model = make_model()
    before = {key: value.clone() for key, value in model.policy.state_dict().items()}
    return [before, dict(model.learn(steps).policy.state_dict())]
