"""Environments that are quick to make and to step."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from tests.transitions import Observation, observer_for


class SpaceEnv(gym.Env[Observation, Any]):
    """Shows observations of any space, moves on whatever the action, and ends an episode after ``length`` steps."""

    def __init__(self, space: spaces.Space, action_space: spaces.Space | None = None, length: int = 20) -> None:
        self.observation_space = space
        self.action_space = action_space or spaces.Discrete(3)
        self.length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict]:
        super().reset(seed=seed)
        if seed is not None or not hasattr(self, "observer"):
            self.observer = observer_for(self.observation_space, np.random.default_rng(seed))
        self.steps = 0
        return self.observer.reset(), {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict]:
        self.steps += 1
        reward = float(np.sum(action)) + self.steps % 3
        return self.observer.step(), reward, self.steps % 13 == 0, self.steps >= self.length, {}
