"""Small buffers of every class, and what is done with them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.buffers import BaseBuffer, RolloutBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv

import sb3_extra_buffers.compressed as compressed
import sb3_extra_buffers.gpu_buffers as gpu_buffers
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from tests.transitions import Transition, copied, play

IMAGES = spaces.Box(0, 255, (4, 8, 9), np.uint8)
RGB = spaces.Box(0, 255, (12, 6, 6), np.uint8)
DICT = spaces.Dict({"image": IMAGES, "a/vector~": spaces.Box(-np.inf, np.inf, (3,), np.float32)})
ACTIONS = spaces.Discrete(3)
SLOTS = 40
"""More than the steps after which a buffer decides how to store observations."""
N_ENVS = 2
ALL_CLASSES = sorted(
    name
    for module in (compressed, gpu_buffers)
    for name in dir(module)
    if name.endswith("Buffer") and not name.startswith("Base")
)
STATE_SHAPE = (1, N_ENVS, 4)


def goal_env() -> DummyVecEnv:
    return DummyVecEnv([lambda: BitFlippingEnv(4, continuous=False)] * N_ENVS)


def class_named(name: str) -> type[BaseCompressedBuffer]:
    return getattr(gpu_buffers if name.startswith("Gpu") else compressed, name)


def make(name: str, space: spaces.Space | None = None, **kwargs: Any) -> BaseCompressedBuffer:
    """An empty buffer of the class ``name``."""
    cls: Any = class_named(name)
    space = space or (DICT if "Dict" in name else IMAGES)
    arguments: dict[str, Any] = {"device": "cpu", "n_envs": N_ENVS, **kwargs}
    if "Her" in name:
        env = goal_env()
        return cls(SLOTS * N_ENVS, env.observation_space, env.action_space, env, **arguments)
    if "Sequence" in name:
        arguments = {"length": 4, "burn_in": 2, "latents": {"state": (3,)}, **arguments}
    if "Recurrent" in name:
        arguments["hidden_state_shape"] = (SLOTS, *STATE_SHAPE)
    if "Rollout" in name:
        buffer = cls(SLOTS, space, ACTIONS, **arguments, gamma=0.9, gae_lambda=0.8)
        buffer.reset()  # as SB3 does before a rollout
        return buffer
    return cls(SLOTS * N_ENVS, space, ACTIONS, **arguments)


def steps_for(buffer: BaseBuffer, count: int) -> list[Transition]:
    return list(itertools.islice(play(buffer.observation_space, N_ENVS, action_space=buffer.action_space), count))


def add(buffer: BaseBuffer, transition: Transition, number: int) -> None:
    """Add a step, with whatever the class wants to have beside it."""
    obs, next_obs, action, reward, done, infos = copied(transition)
    if not isinstance(buffer, RolloutBuffer):
        buffer.add(obs, next_obs, action, reward, done, infos)
        return
    if buffer.full:
        buffer.reset()
    extra: dict[str, Any] = {}
    if "Maskable" in type(buffer).__name__:
        extra["action_masks"] = np.array([[1, number % 2, 1]] * N_ENVS)
    if "Recurrent" in type(buffer).__name__:
        state = th.full(STATE_SHAPE, float(number))
        extra["lstm_states"] = RNNStates((state, state + 1), (state + 2, state + 3))
    buffer.add(obs, action, reward, done, th.tensor(reward * 2), th.tensor(reward - 1), **extra)
    if buffer.full:
        buffer.compute_returns_and_advantage(th.tensor(reward), done)


def draw(buffer: Any, seed: int) -> Any:
    """A batch under a seed, or ``None`` where there is nothing to draw from."""
    np.random.seed(seed)
    if isinstance(buffer, RolloutBuffer):
        return next(iter(buffer.get(16))) if buffer.full else None
    has_some = buffer.size() > 0
    if "Her" in type(buffer).__name__:
        has_some = bool((buffer.ep_length > 0).any())
    elif "Sequence" in type(buffer).__name__:
        has_some = buffer.n_sequences > 0
    return tuple(buffer.sample(16)) if has_some else None
