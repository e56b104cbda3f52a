"""Models with collectors are loaded, changed and trained again."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from sb3_contrib import QRDQN, TQC
from stable_baselines3 import A2C, DQN, PPO, SAC, TD3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.distributed import ShardedReplayBuffer, distributed
from sb3_extra_buffers.errors import ArgumentError, ConfigurationError
from tests.distributed.test_collectors import Spy
from tests.distributed.test_learner import NETWORK, make
from tests.distributed.test_manifest import local_parts
from tests.distributed.test_on_policy import make as make_on_policy


def test_a_saved_learner_goes_on(tmp_path: Any) -> None:
    model = make()
    model.learn(200)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = type(model).load(tmp_path / "model", env=gym.make("CartPole-v1"))
    loaded.load_replay_buffer(tmp_path / "buffer")
    sizes = [part.size() for part in loaded.replay_buffer.parts]
    assert sizes == [part.size() for part in model.replay_buffer.parts]
    loaded.learn(100, reset_num_timesteps=False)
    assert 300 <= loaded.num_timesteps < 310
    assert sum(part.size() for part in loaded.replay_buffer.parts) > sum(sizes)
    # What the new collectors sent does not continue the episodes of the old ones.
    for part, size in zip(loaded.replay_buffer.parts, sizes, strict=True):
        assert ((part.dones + part.timeouts)[size - 1] > 0).all()


IN_SHARDS: dict[str, Any] = {"placement": "shards", "shards": 1, "prefetch": 1, "in_process": True}


@pytest.mark.parametrize("where", [{}, IN_SHARDS], ids=["learner", "shards"])
def test_learning_again_with_optimize_memory_usage_gives_the_weights_of_sb3(where: dict[str, Any]) -> None:
    """The second call of ``learn`` marks the newest step as done, because the next one begins another episode."""
    models, options = [], {"handle_timeout_termination": False}
    for buffer in ({}, {"replay_buffer_class": ShardedReplayBuffer, "replay_buffer_kwargs": options | where}):
        given: dict[str, Any] = {"replay_buffer_kwargs": options, "policy_kwargs": dict(NETWORK)} | buffer
        model = DQN(
            "MlpPolicy", "CartPole-v1", buffer_size=150, learning_starts=20, seed=3, optimize_memory_usage=True, **given
        )
        for _ in range(3):
            with pytest.warns(UserWarning, match="truncated") if model.num_timesteps else contextlib.nullcontext():
                model.learn(103)
        models.append(model)
    for first, second in zip(*(model.policy.parameters() for model in models), strict=True):
        assert (first == second).all()


@pytest.mark.parametrize("where", [{}, IN_SHARDS | {"shards": 2}], ids=["learner", "shards"])
def test_learning_again_with_optimize_memory_usage_and_collectors(where: dict[str, Any]) -> None:
    options = {"handle_timeout_termination": False, **where}
    model = make(optimize_memory_usage=True, replay_buffer_class=ShardedReplayBuffer, replay_buffer_kwargs=options)
    model.learn(200)
    sizes = [part.size() for part in model.replay_buffer.parts]
    with pytest.warns(UserWarning, match="truncated"):
        model.learn(200)
    for part, size in zip(local_parts(model.replay_buffer), sizes, strict=True):
        assert part.size() > size
        assert part.dones[size - 1].all()
    model.replay_buffer.check()


@pytest.mark.parametrize("make_model", [make, make_on_policy], ids=["DQN", "PPO"])
def test_a_model_that_was_loaded_without_an_environment_can_get_one(make_model: Any, tmp_path: Path) -> None:
    model = make_model()
    model.learn(100)
    model.save(tmp_path / "model")
    loaded, n_envs = type(model).load(tmp_path / "model"), model.n_envs
    observation = gym.make("CartPole-v1").reset(seed=0)[0]
    assert loaded.predict(observation, deterministic=True) == model.predict(observation, deterministic=True)
    loaded.set_env(gym.make("CartPole-v1"))
    assert loaded.n_envs == n_envs > 1
    before = loaded.num_timesteps
    loaded.learn(100, reset_num_timesteps=False)
    assert loaded.num_timesteps >= before + 100
    with pytest.raises(ConfigurationError, match="VecNormalize"):
        loaded.set_env(VecNormalize(make_vec_env("CartPole-v1")))
    with pytest.raises(ValueError, match="spaces do not match"):
        loaded.set_env(gym.make("Pendulum-v1"))
    assert loaded.n_envs == n_envs


@pytest.mark.parametrize("make_model", [make, make_on_policy], ids=["DQN", "PPO"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_loaded_model_may_have_other_collectors(make_model: Any, n: int, tmp_path: Path) -> None:
    model = make_model()
    model.learn(100)
    model.save(tmp_path / "model")
    load = partial(type(model).load, tmp_path / "model", env=gym.make("CartPole-v1"))
    collectors = {"n": n, "make_env": partial(gym.make, "CartPole-v1"), "in_process": True}
    loaded = load(collectors=collectors)
    loaded.learn(100)
    buffer = loaded.replay_buffer if make_model is make else loaded.rollout_buffer
    assert [part.pos > 0 for part in buffer.parts] == [True] * n
    with pytest.raises(ArgumentError, match="'number'"):
        load(collectors={"number": 3})
    with pytest.raises(ConfigurationError, match="make_env"):
        load(collectors={"n": 3})


ALGORITHMS: list[Any] = [
    (DQN, "CartPole-v1", {"exploration_final_eps": 0.3, "exploration_fraction": 0.001}),
    (QRDQN, "CartPole-v1", {}),
    (SAC, "Pendulum-v1", {}),
    (TQC, "Pendulum-v1", {}),
    (TD3, "Pendulum-v1", {"action_noise": NormalActionNoise(np.zeros(1), np.full(1, 0.7))}),
    (PPO, "CartPole-v1", {"n_steps": 16, "batch_size": 16, "gamma": 0.5, "gae_lambda": 0.7}),
    (A2C, "CartPole-v1", {"n_steps": 16, "gamma": 0.5}),
]


@pytest.mark.parametrize(("algorithm", "env", "arguments"), ALGORITHMS)
def test_a_model_of_sb3_goes_on_with_collectors(
    algorithm: Any, env: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    model = algorithm("MlpPolicy", env, policy_kwargs={"net_arch": [8]}, device="cpu", **arguments)
    model.learn(32)
    model.save(tmp_path / "model")
    collectors = {"n": 2, "make_env": partial(gym.make, env), "in_process": True}
    name = "rollout" if algorithm in (PPO, A2C) else "replay"
    spy, buffer_class = Spy(), {f"{name}_buffer_class": None}  # instead of that of SB3
    loaded = distributed(algorithm).load(
        tmp_path / "model", env=make_vec_env(env, 3), collectors=collectors, device="cpu", **buffer_class
    )
    with spy.watching():
        loaded.learn(32)
    assert [part.pos > 0 for part in getattr(loaded, f"{name}_buffer").parts] == [True, True]
    for collector in spy.seen:
        for argument in ("gamma", "gae_lambda", "exploration_final_eps"):
            assert getattr(collector.model, argument, None) == getattr(model, argument, None)
        if "action_noise" in arguments:
            assert collector.model.action_noise._sigma == 0.7


def test_collectors_use_what_was_changed_after_the_model_was_created() -> None:
    spy, model = Spy(), make_on_policy()
    model.gamma = 0.25
    with spy.watching():
        model.learn(100)
    assert [collector.model.rollout_buffer.gamma for collector in spy.seen] == [0.25, 0.25]


def test_a_buffer_of_other_collectors_is_refused(tmp_path: Path) -> None:
    model = make(collectors={"n": 3})
    model.learn(50)
    model.save_replay_buffer(tmp_path / "three")
    DQN("MlpPolicy", "CartPole-v1", buffer_size=100).save_replay_buffer(tmp_path / "plain")
    for name, found in (("three", r"ShardedReplayBuffer .* \[2, 2, 2\]"), ("plain", r"ReplayBuffer .* \[\]")):
        other = make()
        other.load_replay_buffer(tmp_path / name)
        with pytest.raises(ConfigurationError, match=f"2 collectors of 2 environments.* {found}"):
            other.learn(50)
