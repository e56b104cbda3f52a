"""Buffers in pairs, SB3's and ours, on any device."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, DictRolloutBuffer, ReplayBuffer, RolloutBuffer

from sb3_extra_buffers.gpu_buffers import (
    GpuDictReplayBuffer,
    GpuDictRolloutBuffer,
    GpuReplayBuffer,
    GpuRolloutBuffer,
)
from tests.compressed import pairs
from tests.transitions import Transition, play

METHODS = ["none", "rle", "zstd", "delta", "auto"]
SPACES: dict[str, spaces.Space] = {
    "channels first": spaces.Box(0, 255, (4, 8, 9), np.uint8),
    "channels last": spaces.Box(0, 255, (8, 9, 3), np.uint8),
    "odd size": spaces.Box(0, 255, (4, 5, 3), np.uint8),
    "float32": spaces.Box(-np.inf, np.inf, (5,), np.float32),
    "float64": spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
    "int64": spaces.Box(-(2**62), 2**62, (3,), np.int64),
    "uint16": spaces.Box(0, 65535, (3, 4, 5), np.uint16),
    "Discrete": spaces.Discrete(600),
    "MultiBinary": spaces.MultiBinary(11),
}
SPACES["Dict"] = spaces.Dict({key: SPACES[key] for key in ("channels last", "float32", "Discrete", "MultiBinary")})
IMAGES = SPACES["channels first"]
SLOTS = 36
LOOK_AFTER = (1, 10, 35, 36, 37, 110)


@functools.cache
def recorded(space: str, n_envs: int) -> list[Transition]:
    return list(itertools.islice(play(SPACES[space], n_envs), LOOK_AFTER[-1]))


def replay_pair(space: spaces.Space, device: str, n_envs: int = 2, slots: int = SLOTS, **kwargs: Any) -> list[Any]:
    known = {key: kwargs.pop(key) for key in ("optimize_memory_usage", "handle_timeout_termination") if key in kwargs}
    plain, ours = ReplayBuffer, GpuReplayBuffer
    if isinstance(space, spaces.Dict):
        plain, ours = DictReplayBuffer, GpuDictReplayBuffer
    actions = kwargs.pop("action_space", spaces.Discrete(5))
    arguments = {"device": device, "n_envs": n_envs, **known}
    return [
        plain(slots * n_envs, space, actions, **arguments),
        ours(slots * n_envs, space, actions, **arguments, **kwargs),
    ]


def rollout_pair(space: spaces.Space, device: str, n_envs: int = 2, slots: int = SLOTS, **kwargs: Any) -> list[Any]:
    plain, ours = RolloutBuffer, GpuRolloutBuffer
    if isinstance(space, spaces.Dict):
        plain, ours = DictRolloutBuffer, GpuDictRolloutBuffer
    actions = kwargs.pop("action_space", spaces.Discrete(5))
    arguments = {"device": device, "n_envs": n_envs, "gamma": 0.9, "gae_lambda": 0.8}
    return [plain(slots, space, actions, **arguments), ours(slots, space, actions, **arguments, **kwargs)]


def check_replay(buffers: list[Any], transitions: Any, look_after: Any = LOOK_AFTER, batch_size: int = 40) -> None:
    pairs.check_replay(buffers, transitions, look_after, (batch_size,))
