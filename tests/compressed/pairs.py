"""A buffer of SB3 and a compressed one side by side, and the check that they sample the same."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, DictRolloutBuffer, ReplayBuffer, RolloutBuffer

from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedDictRolloutBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
)
from tests.transitions import Transition, add_to_replay, add_to_rollout, assert_same, play, sample_both

SPACES: dict[str, spaces.Space] = {
    "channels first": spaces.Box(0, 255, (4, 8, 9), np.uint8),
    "channels last": spaces.Box(0, 255, (8, 9, 3), np.uint8),
    "float32": spaces.Box(-np.inf, np.inf, (5,), np.float32),
    "float64": spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
    "int32": spaces.Box(-(2**31), 2**31 - 1, (7,), np.int32),
    "int64": spaces.Box(-(2**62), 2**62, (3,), np.int64),
    "Discrete": spaces.Discrete(600),
    "MultiDiscrete": spaces.MultiDiscrete([3, 500, 2]),
    "MultiBinary": spaces.MultiBinary(11),
}
SPACES["Dict"] = spaces.Dict({key: SPACES[key] for key in ("channels last", "float32", "Discrete", "MultiBinary")})
SLOTS = 20
"""After as many steps a buffer decides how to store them, so that samples come from before and after."""
LOOK_AFTER = (1, 10, 19, 20, 21, 70)
IMAGES = SPACES["channels first"]


@functools.cache
def recorded(space: str, n_envs: int) -> list[Transition]:
    return list(itertools.islice(play(SPACES[space], n_envs), LOOK_AFTER[-1]))


def replay_pair(space: spaces.Space, n_envs: int = 1, slots: int = SLOTS, **kwargs: Any) -> list[ReplayBuffer]:
    """SB3's buffer and ours. Arguments that SB3 does not know go to ours only."""
    known = {key: kwargs.pop(key) for key in ("optimize_memory_usage", "handle_timeout_termination") if key in kwargs}
    arguments = {"device": "cpu", "n_envs": n_envs, **known}
    action_space = kwargs.pop("action_space", spaces.Discrete(5))
    plain, compressed = ReplayBuffer, CompressedReplayBuffer
    if isinstance(space, spaces.Dict):
        plain, compressed = DictReplayBuffer, CompressedDictReplayBuffer
    return [
        plain(slots * n_envs, space, action_space, **arguments),
        compressed(slots * n_envs, space, action_space, **arguments, **kwargs),
    ]


def rollout_pair(space: spaces.Space, n_envs: int = 1, slots: int = SLOTS, **kwargs: Any) -> list[RolloutBuffer]:
    arguments = {"device": "cpu", "n_envs": n_envs, "gamma": 0.9, "gae_lambda": 0.8}
    action_space = kwargs.pop("action_space", spaces.Discrete(5))
    plain, compressed = RolloutBuffer, CompressedRolloutBuffer
    if isinstance(space, spaces.Dict):
        plain, compressed = DictRolloutBuffer, CompressedDictRolloutBuffer
    return [
        plain(slots, space, action_space, **arguments),
        compressed(slots, space, action_space, **arguments, **kwargs),
    ]


def check_replay(
    buffers: list[Any],
    transitions: Iterable[Transition],
    look_after: Any = LOOK_AFTER,
    batch_sizes: tuple[int, ...] = (64, 1),
) -> None:
    for step, transition in enumerate(transitions, start=1):
        add_to_replay(buffers, transition)
        if step in look_after:
            for batch_size in batch_sizes:
                sample_both(*buffers, batch_size=batch_size, seed=step)
    assert buffers[0].size() == buffers[1].size()


def check_rollout(buffers: list[Any], transitions: list[Transition]) -> None:
    """A rollout, looked at in several epochs."""
    last = transitions[-1]
    for buffer in buffers:
        buffer.reset()
    for transition in transitions:
        add_to_rollout(buffers, transition)
    for buffer in buffers:
        buffer.compute_returns_and_advantage(th.tensor(last.reward), last.done)
    for epoch, batch_size in enumerate((16, 7, None)):
        epochs = []
        for buffer in buffers:
            np.random.seed(epoch)
            epochs.append(tuple(buffer.get(batch_size)))
        assert_same(epochs[1], epochs[0])
    assert_same(buffers[1].values.flatten(), buffers[0].values.flatten())
    assert_same(buffers[1].returns.flatten(), buffers[0].returns.flatten())


# How many environments there are does not concern a codec, so that one of each kind is enough for a single one.
