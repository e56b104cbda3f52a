"""Adapters that give Gymnasium's interface to older environments."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

Image = npt.NDArray[np.uint8]


class CrafterEnv(gym.Env[Image, np.int64]):
    """Crafter: 64x64 RGB, 17 actions."""

    def __init__(self) -> None:
        import crafter

        self._make = crafter.Env
        self._env = crafter.Env(seed=0)
        self.observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(17)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Image, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._env = self._make(seed=seed)
        return self._env.reset(), {}

    def step(self, action: np.int64) -> tuple[Image, float, bool, bool, dict[str, Any]]:
        obs, reward, done, info = self._env.step(int(action))
        is_dead = info["discount"] == 0
        return obs, float(reward), bool(done and is_dead), bool(done and not is_dead), {}


class ProcgenEnv(gym.Env[Image, np.int64]):
    """A Procgen game with a new level in every episode: 64x64 RGB, 15 actions."""

    def __init__(self, game: str) -> None:
        self._game = game
        self._env: Any = None
        self.observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(15)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Image, dict[str, Any]]:
        super().reset(seed=seed)
        if self._env is None or seed is not None:
            from procgen import ProcgenGym3Env

            self._env = ProcgenGym3Env(num=1, env_name=self._game, rand_seed=seed or 0)
        return self._observe()[1], {}

    def step(self, action: np.int64) -> tuple[Image, float, bool, bool, dict[str, Any]]:
        previous = self._env.observe()[1]["rgb"][0].copy()
        self._env.act(np.array([action], np.int32))
        reward, obs, is_first = self._observe()
        # Procgen resets itself before it reports the end of an episode, so the terminal observation is lost. The
        # observation before it takes its place.
        return previous if is_first else obs, reward, is_first, False, {}

    def _observe(self) -> tuple[float, Image, bool]:
        rewards, observations, firsts = self._env.observe()
        return float(rewards[0]), observations["rgb"][0].copy(), bool(firsts[0])
