"""Real games for long runs: Atari games, most of them not used for tuning, and Gymnasium's vector environments."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium as gym
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env

from sb3_extra_buffers.measure.transitions import collect
from sb3_extra_buffers.training_utils.atari import make_env
from tests.transitions import Transition

ATARI = ("Enduro", "Riverraid", "Seaquest", "Qbert", "BattleZone", "MsPacman")
VECTORS = ("CartPole-v1", "Acrobot-v1", "MountainCarContinuous-v0", "Pendulum-v1")


def real_game(name: str, n_envs: int, seed: int) -> tuple[spaces.Space, spaces.Space, Iterator[Transition]]:
    """The spaces of a game, and an endless stream of transitions of a random policy."""
    if name in ATARI:
        from stable_baselines3.common.vec_env import DummyVecEnv

        env = make_env(f"{name}NoFrameskip-v4", n_envs, vec_env_cls=DummyVecEnv, seed=seed)
    elif name in VECTORS:
        env = make_vec_env(name, n_envs, seed=seed)
    else:
        raise ValueError(f"There is no world {name!r}. The games are {', '.join((*ATARI, *VECTORS))}.")
    assert gym.spaces is spaces
    return env.observation_space, env.action_space, (Transition(*step) for step in collect(env, 1 << 40, seed))
