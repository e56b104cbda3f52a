from __future__ import annotations

from pathlib import Path

import pytest
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.base_class import BaseAlgorithm

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.measure.environments import make_env
from sb3_extra_buffers.measure.policies import guess_algorithm, load_policy
from sb3_extra_buffers.measure.transitions import collect


@pytest.mark.parametrize("algorithm", [A2C, DQN, PPO, SAC, TD3, DDPG], ids=lambda algorithm: algorithm.__name__)
def test_the_algorithm_is_told_by_the_file(algorithm: type[BaseAlgorithm], tmp_path: Path) -> None:
    env = "CartPole-v1" if algorithm in (A2C, DQN, PPO) else "Pendulum-v1"
    algorithm("MlpPolicy", env, device="cpu", policy_kwargs={"net_arch": [4]}).save(tmp_path / "model")
    expected = {"DDPG": "td3"}.get(algorithm.__name__, algorithm.__name__.lower())  # DDPG is TD3 with other settings
    assert guess_algorithm(tmp_path / "model.zip") == expected
    policy = load_policy(tmp_path / "model.zip", make_env(env, 2, seed=0))
    assert len(list(collect(make_env(env, 2, seed=0), 3, policy=policy))) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "was trained with the observation space float32"),
        (("dqm",), "Unknown algorithm 'dqm'. The known ones are a2c"),
        (("sac",), "cannot be loaded as SAC"),
    ],
    ids=["another environment", "unknown algorithm", "wrong algorithm"],
)
def test_a_model_that_cannot_play(arguments: tuple[str | None], message: str, tmp_path: Path) -> None:
    DQN("MlpPolicy", "CartPole-v1", buffer_size=10, device="cpu").save(tmp_path / "model")
    with pytest.raises(ConfigurationError, match=message):
        load_policy(tmp_path / "model.zip", make_env("Acrobot-v1", 1, seed=0), *arguments)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.zip").write_text("no")
    with pytest.raises(ConfigurationError, match="is not a model saved by SB3"):
        guess_algorithm(tmp_path / "model.zip")
