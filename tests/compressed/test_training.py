"""Training with a compressed buffer ends in the very same network as training with SB3's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from benchmarks.networks import SmallCnn
from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedDictRolloutBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
)
from tests.environments import SpaceEnv
from tests.methods import installed

METHODS = installed("none", "rle", "rle-jit", "zstd-5", "lz4-frame/1", "igzip1", "delta", "zstd-dict", "auto")
DICT_SPACE = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (36, 36, 3), np.uint8),
        "vector": spaces.Box(-np.inf, np.inf, (4,), np.float32),
        "kind": spaces.Discrete(7),
    }
)
SMALL_IMAGES = {"features_extractor_class": SmallCnn, "net_arch": [8]}


def atari(name: str, n_envs: int) -> VecEnv:
    ale_py = pytest.importorskip("ale_py")

    gym.register_envs(ale_py)
    return VecFrameStack(make_atari_env(f"{name}NoFrameskip-v4", n_envs=n_envs, seed=0), 4)


def train_dqn(**buffer: Any) -> BaseAlgorithm:
    """The buffer is overwritten once, and overwritten frames are of three lives."""
    options = {"learning_starts": 100, "train_freq": 8, "batch_size": 16, "target_update_interval": 50}
    model = DQN(
        "CnnPolicy",
        atari("MsPacman", 1),
        buffer_size=150,
        policy_kwargs=SMALL_IMAGES,
        seed=0,
        device="cpu",
        **options,
        **buffer,
    )
    return model.learn(300)


def train_sac(**buffer: Any) -> BaseAlgorithm:
    env = make_vec_env("Pendulum-v1", n_envs=2, seed=0)
    options = {"learning_starts": 50, "train_freq": 4, "batch_size": 32, "buffer_size": 120}
    model = SAC("MlpPolicy", env, policy_kwargs={"net_arch": [8]}, seed=0, device="cpu", **options, **buffer)
    return model.learn(240)


def train_dict_dqn(**buffer: Any) -> BaseAlgorithm:
    env = make_vec_env(lambda: SpaceEnv(DICT_SPACE), n_envs=2, seed=0)
    options = {"learning_starts": 50, "train_freq": 4, "batch_size": 16, "buffer_size": 120}
    model = DQN("MultiInputPolicy", env, policy_kwargs=DICT_POLICY, seed=0, device="cpu", **options, **buffer)
    return model.learn(240)


def train_ppo(**buffer: Any) -> BaseAlgorithm:
    options = {"n_steps": 40, "batch_size": 20, "n_epochs": 2}
    model = PPO("CnnPolicy", atari("Pong", 2), policy_kwargs=SMALL_IMAGES, seed=0, device="cpu", **options, **buffer)
    return model.learn(160)


def train_dict_ppo(**buffer: Any) -> BaseAlgorithm:
    env = make_vec_env(lambda: SpaceEnv(DICT_SPACE), n_envs=2, seed=0)
    options = {"n_steps": 40, "batch_size": 20, "n_epochs": 2}
    model = PPO("MultiInputPolicy", env, policy_kwargs=DICT_POLICY, seed=0, device="cpu", **options, **buffer)
    return model.learn(160)


def train_a2c(**buffer: Any) -> BaseAlgorithm:
    """Rollouts are shorter than it takes to decide how to store them."""
    env = make_vec_env(lambda: SpaceEnv(DICT_SPACE), n_envs=2, seed=0)
    model = A2C("MultiInputPolicy", env, n_steps=6, policy_kwargs=DICT_POLICY, seed=0, device="cpu", **buffer)
    return model.learn(120)


DICT_POLICY = {"features_extractor_kwargs": {"cnn_output_dim": 8}, "net_arch": [8]}
TRAININGS: dict[str, tuple[Callable[..., BaseAlgorithm], type]] = {
    "DQN on Atari": (train_dqn, CompressedReplayBuffer),
    "SAC on vectors": (train_sac, CompressedReplayBuffer),
    "DQN on a Dict": (train_dict_dqn, CompressedDictReplayBuffer),
    "PPO on Atari": (train_ppo, CompressedRolloutBuffer),
    "PPO on a Dict": (train_dict_ppo, CompressedDictRolloutBuffer),
    "A2C on a Dict": (train_a2c, CompressedDictRolloutBuffer),
}


@functools.cache
def trained_by_sb3(training: str) -> dict[str, th.Tensor]:
    return TRAININGS[training][0]().policy.state_dict()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("training", TRAININGS)
def test_ends_in_the_same_network(training: str, method: str) -> None:
    train, buffer_class = TRAININGS[training]
    kind = "replay" if "Replay" in buffer_class.__name__ else "rollout"
    model = train(**{f"{kind}_buffer_class": buffer_class, f"{kind}_buffer_kwargs": {"compression_method": method}})
    assert isinstance(getattr(model, f"{kind}_buffer"), buffer_class)
    expected = trained_by_sb3(training)
    actual = model.policy.state_dict()
    assert list(actual) == list(expected)
    for name in expected:
        assert th.equal(actual[name], expected[name]), name


def train_on_float64(algorithm: type[BaseAlgorithm], **buffer: Any) -> BaseAlgorithm:
    space, actions = spaces.Box(-np.inf, np.inf, (6,), np.float64), spaces.Box(-1, 1, (2,), np.float32)
    env = make_vec_env(lambda: PreciseEnv(space, actions), n_envs=2, seed=0)
    options = {"learning_starts": 50, "buffer_size": 120} if algorithm is SAC else {"n_steps": 40, "batch_size": 20}
    model = algorithm("MlpPolicy", env, policy_kwargs={"net_arch": [8]}, seed=0, device="cpu", **options, **buffer)
    return model.learn(240)


class PreciseEnv(SpaceEnv):
    """Its observations are no float32 numbers."""

    def reset(self, **kwargs: Any) -> Any:
        if kwargs.get("seed") is not None:
            self.rng = np.random.default_rng(kwargs["seed"])
        self.steps = 0
        return self.rng.normal(size=6), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.rng.normal(size=6) / 3, float(np.sum(action)), self.steps % 13 == 0, self.steps >= 20, {}


@pytest.mark.parametrize("algorithm", [SAC, PPO])
@pytest.mark.filterwarnings("ignore:Observations of dtype float64 are stored as float32")
def test_float64_observations_stored_as_float32_end_in_the_same_network(algorithm: type[BaseAlgorithm]) -> None:
    """SB3's networks get float32 anyway."""
    kind, cls = ("replay", CompressedReplayBuffer) if algorithm is SAC else ("rollout", CompressedRolloutBuffer)
    buffer = {f"{kind}_buffer_class": cls, f"{kind}_buffer_kwargs": {"dtypes": {"elem_type": "float32"}}}
    expected = train_on_float64(algorithm).policy.state_dict()
    for name, tensor in train_on_float64(algorithm, **buffer).policy.state_dict().items():
        assert th.equal(tensor, expected[name]), name
