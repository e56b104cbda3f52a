"""A model whose actions are known beforehand, and SB3's own collection with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv


class Scripted:
    """Draws its actions from a seed, whatever it sees."""

    def __init__(self, env: VecEnv, seed: int = 0) -> None:
        self.space, self.n_envs = env.action_space, env.num_envs
        self.space.seed(seed)

    def predict(self, observation: Any, *args: Any, **kwargs: Any) -> tuple[np.ndarray, None]:
        return np.stack([self.space.sample() for _ in range(self.n_envs)]), None


def collected_by_sb3(env: VecEnv, steps: int, algorithm: type[OffPolicyAlgorithm] = DQN, **kwargs: Any) -> ReplayBuffer:
    """What SB3 stores in ``steps`` steps of each environment with the actions of :class:`Scripted`."""
    model = algorithm(
        "MultiInputPolicy" if hasattr(env.observation_space, "spaces") else "MlpPolicy",
        env,
        buffer_size=steps * env.num_envs,
        learning_starts=0,
        gradient_steps=0,
        train_freq=1,
        policy_kwargs={"net_arch": [4]},
        device="cpu",
        **kwargs,
    )
    script = Scripted(env)
    model.predict = script.predict  # type: ignore[method-assign]  # plays the script
    if algorithm is DQN:
        model.exploration_schedule = lambda _: 0.0  # type: ignore[attr-defined]
    model.learn(steps * env.num_envs)
    assert isinstance(model.replay_buffer, ReplayBuffer)
    return model.replay_buffer


def assert_same_contents(actual: Any, expected: Any, exact: bool = True) -> None:
    """Every field of two replay buffers, slot by slot."""
    assert (actual.pos, actual.full) == (expected.pos, expected.full)
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        one, two = getattr(actual, name), getattr(expected, name)
        pairs = [(one[key], two[key]) for key in two] if isinstance(two, dict) else [(one, two)]
        for left, right in pairs:
            if exact:
                np.testing.assert_array_equal(np.asarray(left), np.asarray(right), err_msg=name, strict=True)
            else:
                np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=1e-5, atol=1e-5, err_msg=name)


__all__ = ["DQN", "SAC", "Scripted", "assert_same_contents", "collected_by_sb3"]
