"""Recording while a model trains: each frame with the action that followed it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_extra_buffers.distributed import distributed
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.recording import DummyRecordBuffer, FramelessRecordBuffer, RecordBuffer, RecordCallback
from sb3_extra_buffers.training_utils.device_env import DeviceStep, DeviceVecEnv
from sb3_extra_buffers.training_utils.device_loop import on_device

LENGTH = 7


class Clock(gym.Env[np.ndarray, Any]):
    """Shows how many steps it has been alone, in its observations and its pictures. Rewards are ten times that."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # as gymnasium declares it
    observation_space = spaces.Box(0, 255, (1, 8, 9), np.uint8)

    def __init__(self, render_mode: str | None = "rgb_array", action_space: spaces.Space | None = None) -> None:
        self.render_mode = render_mode
        self.action_space = action_space or spaces.Discrete(4)
        self.memory = np.zeros((1, 8, 9), np.uint8)  # always the same, as in some environments

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.memory[:] = 0
        return self.memory, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.memory += 1
        time = int(self.memory[0, 0, 0])
        return self.memory, 10.0 * (time - 1), time == LENGTH, False, {"time": time, "action": action}

    def render(self) -> np.ndarray:
        return np.repeat(self.memory.transpose(1, 2, 0), 3, axis=2)


def assert_times(buffer: RecordBuffer, n: int) -> None:
    expected = np.arange(n) % LENGTH
    records = buffer.to_numpy()
    assert records.frames[:, 0, 0, 0].tolist() == expected.tolist()
    assert records.rewards.tolist() == (10 * expected).tolist()


def ppo(env: Any, algorithm: Any = PPO) -> BaseAlgorithm:
    return algorithm(
        "MlpPolicy", env, n_steps=10, batch_size=10, n_epochs=1, policy_kwargs={"net_arch": [4]}, device="cpu"
    )


def dqn(env: Any, algorithm: Any = DQN) -> BaseAlgorithm:
    return algorithm("MlpPolicy", env, buffer_size=50, learning_starts=5, policy_kwargs={"net_arch": [4]}, device="cpu")


@pytest.mark.parametrize("make_model", [ppo, dqn])
@pytest.mark.parametrize("source", ["auto", "render", "observation"])
def test_the_callback_records_one_environment(make_model: Any, source: Any) -> None:
    model = make_model(DummyVecEnv([Clock, Clock]))
    recorder = RecordCallback(source=source, env_index=1)
    model.learn(40, callback=recorder)
    assert_times(recorder.buffer, 20)
    assert recorder.buffer.ch_num == (1 if source == "observation" else 3)
    model.learn(20, callback=recorder, reset_num_timesteps=False)
    assert_times(recorder.buffer, model.num_timesteps // 2)


def test_the_callback_records_actions_and_features() -> None:
    continuous = spaces.Box(-1, 1, (2,), np.float32)
    model = ppo(DummyVecEnv([lambda: Clock(action_space=continuous)]))
    buffer = RecordBuffer((8, 9), 3, 100, [None, None, np.int16, (np.float32, 2)], action_shape=(2,), action_dtype="f4")
    model.learn(20, callback=RecordCallback(buffer, features=lambda info: (info["time"], info["action"])))
    assert_times(buffer, 20)
    assert buffer.features is not None
    assert buffer.features["0"][:20].tolist() == (1 + np.arange(20) % LENGTH).tolist()
    np.testing.assert_array_equal(buffer.features["1"], buffer.actions)
    assert np.abs(buffer.actions).max() <= 1


@pytest.mark.parametrize("buffer", [FramelessRecordBuffer((8, 9), size=3), DummyRecordBuffer()])
def test_the_callback_feeds_any_record_buffer(buffer: Any) -> None:
    recorder = RecordCallback(buffer)
    ppo(DummyVecEnv([lambda: Clock(render_mode=None)])).learn(10, callback=recorder)
    assert recorder.buffer is buffer
    assert len(buffer) == (3 if isinstance(buffer, RecordBuffer) else 0)


class Ticks:
    """Images on a device that show how many steps have passed."""

    num_envs, device = 2, th.device("cpu")
    observation_space = spaces.Box(0, 255, (1, 8, 9), np.uint8)

    def __init__(self, action_space: spaces.Space) -> None:
        self.action_space = action_space
        self.actions: list[Any] = []

    def reset(self, seed: int | None = None) -> th.Tensor:
        self.time = 0
        return th.zeros((2, 1, 8, 9), dtype=th.uint8)

    def step(self, actions: th.Tensor) -> DeviceStep:
        self.actions.append(actions[0].tolist())
        self.time += 1
        obs, never = th.full((2, 1, 8, 9), self.time, dtype=th.uint8), th.zeros(2, dtype=th.bool)
        return DeviceStep(obs, th.full((2,), 10.0 * (self.time - 1)), never, never, obs)


@pytest.mark.parametrize(
    ("make_model", "algorithm", "actions"),
    [(ppo, PPO, spaces.Box(-0.1, 0.1, (2,))), (dqn, DQN, spaces.Discrete(3))],
)
def test_the_callback_records_environments_on_a_device(make_model: Any, algorithm: Any, actions: spaces.Space) -> None:
    env, recorder = Ticks(actions), RecordCallback()
    make_model(DeviceVecEnv(env), on_device(algorithm)).learn(40, callback=recorder)
    records = recorder.buffer.to_numpy()
    assert records.frames[:, 0, 0, 0].tolist() == list(range(20))
    assert records.rewards.tolist() == [10 * time for time in range(20)]
    assert records.actions.tolist() == env.actions


@pytest.mark.parametrize(
    ("algorithm", "options"), [(PPO, {"n_steps": 10, "batch_size": 10}), (DQN, {"buffer_size": 50})]
)
def test_a_model_with_collectors_cannot_be_recorded(algorithm: Any, options: dict[str, Any]) -> None:
    collectors = {"n": 1, "in_process": True, "make_env": Clock}
    model = distributed(algorithm)("MlpPolicy", Clock(), collectors=collectors, **options)
    with pytest.raises(ConfigurationError, match="no environment of its own"):
        model.learn(10, callback=RecordCallback())


def test_what_cannot_be_recorded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="not images"):
        ppo(gym.make("CartPole-v1")).learn(10, callback=RecordCallback())
    with pytest.raises(ConfigurationError, match="render_mode=None, rendered no array"):
        ppo(Clock(render_mode=None)).learn(10, callback=RecordCallback(source="render"))
    with pytest.raises(ConfigurationError, match="'auto', 'render' or 'observation'"):
        RecordCallback(source="screen")  # type: ignore[arg-type]
    monkeypatch.setattr(Clock, "render", lambda env: None)
    with pytest.raises(ConfigurationError, match="no array of pixels"):
        ppo(Clock()).learn(10, callback=RecordCallback())
