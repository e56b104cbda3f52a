"""Loops that stay on the device train the same networks as SB3's, and wait for the device once per rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import QRDQN, RecurrentPPO
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from device_breakout import DeviceBreakout
from sb3_extra_buffers.errors import ConfigurationError, ObservationError
from sb3_extra_buffers.gpu_buffers import GpuDictRolloutBuffer, GpuReplayBuffer, GpuRolloutBuffer
from sb3_extra_buffers.training_utils.device_env import DeviceStep, DeviceVecEnv
from sb3_extra_buffers.training_utils.device_loop import on_device, random_actions

N_ENVS = 3
ON_POLICY: dict[str, Any] = {"n_steps": 32, "seed": 1, "device": "cpu"}
OFF_POLICY: dict[str, Any] = {
    "buffer_size": 150,
    "learning_starts": 30,
    "batch_size": 8,
    "train_freq": 2,
    "target_update_interval": 12,
    "exploration_fraction": 0.9,
    "seed": 1,
    "device": "cpu",
}
needs_cuda = pytest.mark.skipif(not th.cuda.is_available(), reason="needs CUDA")


class Points:
    """Points that actions move: vectors, or Dicts of vectors, and continuous actions."""

    def __init__(self, in_dict: bool, device: str = "cpu") -> None:
        self.num_envs, self.device = N_ENVS, th.device(device)
        box = spaces.Box(-10, 10, (2,), np.float32)
        self.observation_space = (
            spaces.Dict({"place": box, "time": spaces.Box(0, 9, (1,), np.float32)}) if in_dict else box
        )
        self.action_space = spaces.Box(-0.5, 0.5, (2,), np.float32)
        self._in_dict = in_dict

    def reset(self, seed: int | None = None) -> Any:
        self._place, self._time = th.zeros((N_ENVS, 2)) + th.arange(N_ENVS)[:, None], th.zeros((N_ENVS, 1))
        return self._observed()

    def _observed(self) -> Any:
        return {"place": self._place, "time": self._time} if self._in_dict else self._place

    def step(self, actions: th.Tensor) -> DeviceStep:
        assert ((actions >= -0.5) & (actions <= 0.5)).all()
        self._place, self._time = self._place + actions, self._time + 1
        final, rewards = self._observed(), -self._place.square().sum(1)
        terminated, truncated = self._place[:, 0] > 2.4, self._time[:, 0] >= 9
        ended = (terminated | truncated)[:, None]
        self._place, self._time = self._place.masked_fill(ended, 0), self._time.masked_fill(ended, 0)
        return DeviceStep(self._observed(), rewards, terminated, truncated, final)


class Log(BaseCallback):
    """What callbacks see."""

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.most = most

    def _on_rollout_start(self) -> None:
        self.calls.append("start")

    def _on_step(self) -> bool:
        self.calls.append((self.num_timesteps, np.asarray(self.locals["dones"]).tolist()))
        assert len(self.locals["infos"]) == N_ENVS
        return self.most is None or self.num_timesteps < self.most

    def _on_rollout_end(self) -> None:
        self.calls.append("end")


def breakout(**options: Any) -> DeviceVecEnv:
    return DeviceVecEnv(DeviceBreakout(**{"num_envs": N_ENVS, "device": "cpu", "max_episode_steps": 22} | options))


def train(algorithm: Any, env: DeviceVecEnv, policy: str, steps: int, options: dict[str, Any], most: int | None) -> Any:
    model = algorithm(policy, env, **options)
    log = Log(most)
    model.learn(steps, callback=log)
    return model, log.calls


def assert_same_training(
    algorithm: Any, make_env: Any, policy: str, steps: int, options: dict[str, Any], most: int | None = None
) -> None:
    """SB3's loop, which copies to the host, and ours."""
    plain, expected = train(algorithm, make_env(), policy, steps, options, most)
    ours, calls = train(on_device(algorithm), make_env(), policy, steps, options, most)
    assert calls == expected
    for (name, part), other in zip(ours.policy.state_dict().items(), plain.policy.state_dict().values(), strict=True):
        assert th.equal(part, other), name
    assert ours.num_timesteps == plain.num_timesteps
    assert ours._episode_num == plain._episode_num
    episodes = [[(episode["r"], episode["l"]) for episode in model.ep_info_buffer] for model in (ours, plain)]
    assert episodes[0] == episodes[1]
    assert episodes[0]
    logged = [
        {key: value for key, value in model.logger.name_to_value.items() if not key.startswith("time/")}
        for model in (ours, plain)
    ]
    assert logged[0] == logged[1]


def test_ppo_as_with_sb3s_loop() -> None:
    options = ON_POLICY | {"batch_size": 24, "n_epochs": 2}
    assert_same_training(PPO, breakout, "MlpPolicy", 2 * 32 * N_ENVS, options)


def test_ppo_that_is_stopped_as_with_sb3s_loop() -> None:
    options = ON_POLICY | {"batch_size": 24, "n_epochs": 1}
    assert_same_training(PPO, breakout, "MlpPolicy", 3 * 32 * N_ENVS, options, most=40 * N_ENVS)


@pytest.mark.parametrize("algorithm", [DQN, QRDQN])
def test_dqn_as_with_sb3s_loop(algorithm: Any) -> None:
    assert_same_training(algorithm, breakout, "MlpPolicy", 60 * N_ENVS, OFF_POLICY)


@pytest.mark.parametrize("in_dict", [False, True])
@pytest.mark.parametrize("use_sde", [False, True])
def test_continuous_actions_as_with_sb3s_loop(in_dict: bool, use_sde: bool) -> None:
    options = ON_POLICY | {"use_sde": use_sde, "sde_sample_freq": 4 if use_sde else -1}
    assert_same_training(
        A2C, lambda: DeviceVecEnv(Points(in_dict)), "MultiInputPolicy" if in_dict else "MlpPolicy", 300, options
    )
    model = on_device(A2C)("MultiInputPolicy" if in_dict else "MlpPolicy", DeviceVecEnv(Points(in_dict)), **options)
    assert type(model.rollout_buffer) is (GpuDictRolloutBuffer if in_dict else GpuRolloutBuffer)


@pytest.mark.parametrize("algorithm", [PPO, DQN])
def test_saving_and_loading(algorithm: Any, tmp_path: Path) -> None:
    options = ON_POLICY | {"batch_size": 24, "n_epochs": 1} if algorithm is PPO else OFF_POLICY
    model = on_device(algorithm)("MlpPolicy", breakout(), **options)
    model.learn(32 * N_ENVS)
    model.save(tmp_path / "model")
    for cls in (on_device(algorithm), algorithm):
        again = cls.load(tmp_path / "model", env=breakout(), device="cpu")
        for part, other in zip(again.policy.parameters(), model.policy.parameters(), strict=True):
            assert th.equal(part, other)
        again.learn(32 * N_ENVS, reset_num_timesteps=False)
        assert again.num_timesteps == 64 * N_ENVS


def test_goes_on_where_it_was() -> None:
    """Learning twice continues episodes, as with SB3's loop."""
    weights = []
    for algorithm in (PPO, on_device(PPO)):
        model = algorithm("MlpPolicy", breakout(), batch_size=24, n_epochs=1, **ON_POLICY)
        for _ in range(2):
            model.learn(32 * N_ENVS, reset_num_timesteps=False)
        weights.append(th.cat([part.flatten() for part in model.policy.parameters()]))
    assert th.equal(*weights)


def test_evaluation_and_callbacks_of_sb3(tmp_path: Path) -> None:
    model = on_device(DQN)("MlpPolicy", breakout(), **OFF_POLICY)
    evaluation = EvalCallback(
        breakout(), n_eval_episodes=2, eval_freq=20, verbose=0, best_model_save_path=str(tmp_path)
    )
    model.learn(40 * N_ENVS, callback=evaluation)
    assert (tmp_path / "best_model.zip").exists()
    returns, lengths = evaluate_policy(model, breakout(), n_eval_episodes=4, return_episode_rewards=True)
    assert len(returns) == 4
    assert max(lengths) <= 22


def test_as_a_vec_env() -> None:
    env, tensors = breakout(), DeviceBreakout(N_ENVS, "cpu", max_episode_steps=22)
    env.seed(5)
    obs = env.reset()
    assert np.array_equal(obs, tensors.reset(5))
    n_ended, returns = 0, np.zeros(N_ENVS)
    for i in range(60):
        actions = np.arange(N_ENVS) * i % 3
        obs, rewards, dones, infos = env.step(actions)
        step = tensors.step(th.as_tensor(actions))
        assert np.array_equal(obs, step.obs)
        assert np.array_equal(rewards, step.rewards)
        returns += rewards
        assert np.array_equal(dones, step.terminated | step.truncated)
        for one, info in enumerate(infos):
            assert ("episode" in info) == dones[one]
            if dones[one]:
                assert info["episode"]["r"] == returns[one]
                assert np.array_equal(info["terminal_observation"], step.final_obs[one])
                assert info["TimeLimit.truncated"] == step.truncated[one]
                returns[one], n_ended = 0, n_ended + 1
    assert n_ended
    assert env.get_attr("num_envs") == [N_ENVS] * N_ENVS


@pytest.mark.parametrize("space", [spaces.Discrete(5), spaces.Discrete(3, start=-1), spaces.MultiDiscrete([2, 3])])
def test_random_actions(space: spaces.Space[Any]) -> None:
    space.seed(0)
    expected = [np.asarray(space.sample()).tolist() for _ in range(40)]
    space.seed(0)
    assert [*random_actions(space, 27).tolist(), *random_actions(space, 13).tolist()] == expected


@needs_cuda
@pytest.mark.parametrize("algorithm", [PPO, DQN])
def test_no_step_waits_for_the_gpu(algorithm: Any) -> None:
    """Neither to act, nor to store a step."""

    class Strict(BaseCallback):
        def _on_rollout_start(self) -> None:
            th.cuda.set_sync_debug_mode("error")

        def _on_step(self) -> bool:
            n_steps = self.locals["n_steps"]
            if algorithm is PPO and n_steps == 14:  # then come the numbers of the whole rollout
                th.cuda.set_sync_debug_mode("default")
            return True

        def _on_rollout_end(self) -> None:
            th.cuda.set_sync_debug_mode("default")

    env = breakout(num_envs=8, device="cuda", max_episode_steps=None)
    options: dict[str, Any] = {
        "n_steps": 16,
        "batch_size": 64,
        "n_epochs": 1,
        "rollout_buffer_kwargs": {"frame_stack": 4},
    }
    if algorithm is DQN:
        options = OFF_POLICY | {"device": "cuda", "train_freq": 16, "replay_buffer_kwargs": {"frame_stack": 4}}
        options["buffer_size"] = 4_000
    model = on_device(algorithm)("CnnPolicy", env, **options | {"device": "cuda"})
    model.learn(16 * 8)  # kernels are compiled
    try:
        model.learn(6 * 16 * 8, callback=Strict())
    finally:
        th.cuda.set_sync_debug_mode("default")
    assert model.ep_info_buffer


@needs_cuda
@pytest.mark.parametrize("algorithm", [PPO, DQN])
def test_on_a_gpu_as_with_sb3s_loop(algorithm: Any) -> None:
    options = ON_POLICY | {"batch_size": 24, "n_epochs": 2} if algorithm is PPO else OFF_POLICY
    weights = []
    for cls in (algorithm, on_device(algorithm)):
        model = cls("CnnPolicy", breakout(device="cuda"), **options | {"device": "cuda"})
        model.learn(64 * N_ENVS)
        weights.append(th.cat([part.flatten() for part in model.policy.parameters()]))
    assert th.equal(*weights)


@pytest.mark.parametrize("algorithm", [SAC, RecurrentPPO, int])
def test_other_algorithms(algorithm: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"for PPO, A2C, DQN .*not for {algorithm.__name__}"):
        on_device(algorithm)


def test_bad_arguments() -> None:
    with pytest.raises(ConfigurationError, match="VecNormalize cannot stay on the device: pass a DeviceVecEnv"):
        on_device(PPO)("MlpPolicy", VecNormalize(breakout()), batch_size=24, **ON_POLICY).learn(96)
    with pytest.raises(ConfigurationError, match="A RolloutBuffer copies to the host: use GpuRolloutBuffer"):
        on_device(A2C)("MlpPolicy", breakout(), rollout_buffer_class=RolloutBuffer, **ON_POLICY).learn(96)
    with pytest.raises(ConfigurationError, match="A ReplayBuffer copies to the host: use GpuReplayBuffer"):
        on_device(DQN)("MlpPolicy", breakout(), replay_buffer_class=ReplayBuffer, **OFF_POLICY).learn(96)
    options = OFF_POLICY | {"train_freq": (1, "episode")}
    with pytest.raises(ConfigurationError, match="train_freq must be a number of steps"):
        on_device(DQN)("MlpPolicy", breakout(num_envs=1), **options).learn(96)
    with pytest.raises(ConfigurationError, match="A list has no 'num_envs'"):
        DeviceVecEnv([])  # type: ignore[arg-type]
    assert type(on_device(DQN)("MlpPolicy", breakout(), **OFF_POLICY).replay_buffer) is GpuReplayBuffer
    assert on_device(DQN) is on_device(DQN)


def test_wrong_observations() -> None:
    env = Points(in_dict=False)
    env.observation_space = spaces.Box(-10, 10, (3,), np.float32)
    with pytest.raises(ObservationError, match=r"must be tensors of \(3, 3\), not \(3, 2\)"):
        DeviceVecEnv(env).reset()
