"""Checkpoints of model and buffer, and training that goes on from the newest whole one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.compressed import CompressedHerReplayBuffer, CompressedNStepReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.distributed import ShardedReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.training_utils.checkpoints import CheckpointBufferCallback
from tests.transitions import assert_same


def dqn(env: Any = "CartPole-v1", **kwargs: Any) -> DQN:
    arguments = {"buffer_size": 500, "learning_starts": 20, "policy_kwargs": {"net_arch": [8]}, "seed": 0}
    return DQN("MlpPolicy", env, **{**arguments, "replay_buffer_class": CompressedReplayBuffer, **kwargs})


def trained(path: Path, steps: int = 120, keep: int = 1) -> DQN:
    return dqn().learn(steps, callback=CheckpointBufferCallback(50, path, keep=keep))


def same_weights(one: DQN, other: DQN) -> None:
    assert_same(dict(one.policy.state_dict()), dict(other.policy.state_dict()))


def test_training_goes_on_where_it_was(tmp_path: Path) -> None:
    model = trained(tmp_path)
    resumed = CheckpointBufferCallback.resume(DQN, tmp_path, env=model.get_env())
    assert resumed is not None
    assert resumed.num_timesteps == 120
    assert type(resumed.replay_buffer) is CompressedReplayBuffer
    same_weights(resumed, model)
    batches = []
    for buffer in (resumed.replay_buffer, model.replay_buffer):
        np.random.seed(3)
        batches.append(tuple(buffer.sample(30)))
    assert_same(*batches)
    resumed.learn(100, reset_num_timesteps=False, callback=CheckpointBufferCallback(50, tmp_path))
    assert resumed.replay_buffer.size() == 220
    assert CheckpointBufferCallback.resume(DQN, tmp_path).num_timesteps == 220


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    assert CheckpointBufferCallback.resume(DQN, tmp_path / "nowhere") is None


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_are_kept_and_folders_are_used_again(keep: int, tmp_path: Path) -> None:
    trained(tmp_path, steps=350, keep=keep)
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == keep + 1
    found = []
    for _ in range(keep):
        newest = CheckpointBufferCallback.newest(tmp_path)
        assert newest is not None
        found.append(CheckpointBufferCallback.resume(DQN, tmp_path).num_timesteps)
        shutil.rmtree(newest)
    assert found == [352, 350][:keep]  # the last one at the end, which comes after a whole number of DQN's rollouts


@pytest.mark.parametrize("damage", ["complete.json", "model.zip", "buffer"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(damage: str, tmp_path: Path) -> None:
    """As when the process is killed after it has written one of the files."""
    trained(tmp_path, steps=100, keep=2)
    newest = CheckpointBufferCallback.newest(tmp_path)
    assert newest is not None
    if damage == "complete.json":
        (newest / damage).unlink()
    elif damage == "model.zip":
        dqn().save(newest / damage)
    else:
        buffer = CompressedReplayBuffer.load(newest / damage)
        buffer.rewards[0] += 1
        buffer.save(newest / damage)
    assert CheckpointBufferCallback.newest(tmp_path) not in (None, newest)
    assert CheckpointBufferCallback.resume(DQN, tmp_path).num_timesteps == 50


def test_files_of_another_kind_of_run_do_not_stay(tmp_path: Path) -> None:
    """PPO saves no buffer, so that of DQN, from an earlier run in the same folder, is not part of its checkpoint."""
    model = dqn(VecNormalize(make_vec_env("CartPole-v1", seed=0)))
    model.learn(150, callback=CheckpointBufferCallback(50, tmp_path))
    ppo = PPO("MlpPolicy", "CartPole-v1", n_steps=16, batch_size=16, device="cpu")
    ppo.learn(64, callback=CheckpointBufferCallback(16, tmp_path))
    for folder in tmp_path.iterdir():
        assert sorted(entry.name for entry in folder.iterdir()) == ["complete.json", "model.zip"]


def test_folders_that_a_user_has_put_into_a_checkpoint_stay(tmp_path: Path) -> None:
    """Jupyter makes one when it opens a file."""
    trained(tmp_path)
    for folder in tmp_path.iterdir():
        (folder / ".ipynb_checkpoints").mkdir()
    trained(tmp_path)
    assert CheckpointBufferCallback.resume(DQN, tmp_path) is not None
    assert len(list(tmp_path.glob("*/.ipynb_checkpoints"))) == 2


def test_a_run_that_starts_anew_in_an_old_folder_is_the_newest(tmp_path: Path) -> None:
    trained(tmp_path, steps=200)
    model = dqn(learning_starts=30)
    model.learn(60, callback=CheckpointBufferCallback(50, tmp_path))
    resumed = CheckpointBufferCallback.resume(DQN, tmp_path)
    assert resumed is not None
    assert resumed.num_timesteps == 60
    same_weights(resumed, model)


def test_statistics_of_vec_normalize(tmp_path: Path) -> None:
    model = dqn(VecNormalize(make_vec_env("CartPole-v1", seed=0)))
    model.learn(60, callback=CheckpointBufferCallback(50, tmp_path))
    resumed = CheckpointBufferCallback.resume(DQN, tmp_path, env=VecNormalize(make_vec_env("CartPole-v1")))
    np.testing.assert_array_equal(resumed.env.obs_rms.mean, model.env.obs_rms.mean)


def test_her(tmp_path: Path) -> None:
    env = BitFlippingEnv(4, continuous=False)
    model = DQN("MultiInputPolicy", env, learning_starts=20, replay_buffer_class=CompressedHerReplayBuffer)
    model.learn(56, callback=CheckpointBufferCallback(50, tmp_path))
    resumed = CheckpointBufferCallback.resume(DQN, tmp_path, env=env)
    resumed.learn(32, reset_num_timesteps=False)
    assert resumed.replay_buffer.size() == 88


def test_n_step_returns_do_not_go_on_into_the_resumed_run(tmp_path: Path) -> None:
    options = {"n_steps": 3, "gamma": 1.0}
    model = dqn(replay_buffer_class=CompressedNStepReplayBuffer, replay_buffer_kwargs=options, learning_starts=1000)
    model.learn(60, callback=CheckpointBufferCallback(50, tmp_path))
    assert not model.replay_buffer.dones[59].any()
    resumed = CheckpointBufferCallback.resume(DQN, tmp_path, env=model.get_env())
    resumed.learn(20, reset_num_timesteps=False)
    batch = resumed.replay_buffer._get_samples(np.array([59, 60]))
    assert batch.rewards.reshape(-1).tolist() == [1.0, 3.0]
    assert batch.dones.reshape(-1).tolist() == [0.0, 0.0]


def test_the_first_observation_of_a_resumed_run_is_no_next_observation(tmp_path: Path) -> None:
    model = dqn(optimize_memory_usage=True, replay_buffer_kwargs={"handle_timeout_termination": False})
    model.learn(60, callback=CheckpointBufferCallback(50, tmp_path))
    assert not model.replay_buffer.dones[59].any()
    resumed = CheckpointBufferCallback.resume(DQN, tmp_path, env=model.get_env())
    resumed.learn(20, reset_num_timesteps=False)
    assert resumed.replay_buffer._get_samples(np.array([59])).dones.item() == 1


def test_on_policy_algorithms_have_no_buffer_to_keep(tmp_path: Path) -> None:
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=32)
    model.learn(64, callback=CheckpointBufferCallback(32, tmp_path))
    assert CheckpointBufferCallback.resume(PPO, tmp_path).num_timesteps == 64


def test_buffers_of_sb3_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="A ReplayBuffer cannot be saved"):
        dqn(replay_buffer_class=None).learn(30, callback=CheckpointBufferCallback(10, tmp_path))


def test_buffers_of_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"with model\.replay_buffer\.save"):
        dqn(replay_buffer_class=ShardedReplayBuffer).learn(30, callback=CheckpointBufferCallback(10, tmp_path))


@pytest.mark.parametrize(("every", "keep"), [(0, 1), (10, 0)])
def test_numbers_that_make_no_sense(every: int, keep: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        CheckpointBufferCallback(every, tmp_path, keep=keep)
