from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.base_class import BaseAlgorithm

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.measure.environments import make_env
from sb3_extra_buffers.measure.policies import load_policy
from sb3_extra_buffers.measure.transitions import collect


@pytest.mark.parametrize("algorithm", [A2C, DQN, PPO, SAC, TD3, DDPG], ids=lambda algorithm: algorithm.__name__)
def test_the_policy_of_any_algorithm_plays_as_the_model_does(algorithm: type[BaseAlgorithm], tmp_path: Path) -> None:
    env = "CartPole-v1" if algorithm in (A2C, DQN, PPO) else "Pendulum-v1"
    algorithm("MlpPolicy", env, device="cpu", policy_kwargs={"net_arch": [4]}).save(tmp_path / "model")
    policy, model = load_policy(tmp_path / "model.zip", make_env(env, 2, seed=0)), algorithm.load(tmp_path / "model")
    transitions = list(collect(make_env(env, 2, seed=0), 3, policy=policy))
    assert len(transitions) == 3
    for transition in transitions:
        expected, _ = model.predict(transition.obs, deterministic=True)
        np.testing.assert_array_equal(policy.predict(transition.obs, deterministic=True)[0], expected)


def test_a_model_for_another_environment_cannot_play(tmp_path: Path) -> None:
    DQN("MlpPolicy", "CartPole-v1", buffer_size=10, device="cpu").save(tmp_path / "model")
    with pytest.raises(ConfigurationError, match="was trained with the observation space float32"):
        load_policy(tmp_path / "model.zip", make_env("Acrobot-v1", 1, seed=0))


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.zip").write_text("no")
    with pytest.raises(ConfigurationError, match=r"Cannot load the policy in .* \(.*\). Pass a .zip file"):
        load_policy(tmp_path / "model.zip", make_env("Acrobot-v1", 1, seed=0))


def test_a_recurrent_policy_of_contrib_plays(tmp_path: Path) -> None:
    contrib = pytest.importorskip("sb3_contrib")
    contrib.RecurrentPPO("MlpLstmPolicy", "CartPole-v1", n_steps=8, device="cpu").save(tmp_path / "model")
    env = make_env("CartPole-v1", 2, seed=0)
    assert len(list(collect(env, 3, policy=load_policy(tmp_path / "model.zip", env)))) == 3
