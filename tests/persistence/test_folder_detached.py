"""Folders that cannot be used: SB3's ``load()`` creates a buffer all the same, which says why when it is used."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError
from sb3_extra_buffers.training_utils.checkpoints import CheckpointBufferCallback
from tests.persistence.folders import USES, filled, on_disk


def model_on_disk(folder: Path, n_envs: int = 1) -> DQN:
    return DQN(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs),
        buffer_size=500,
        replay_buffer_class=CompressedReplayBuffer,
        replay_buffer_kwargs={"storage": "mmap", "path": folder / "buffer"},
        learning_starts=10,
        device="cpu",
    )


def test_a_model_can_be_loaded_while_the_one_that_was_trained_lives(tmp_path: Path) -> None:
    model = model_on_disk(tmp_path)
    model.learn(50)
    model.save(tmp_path / "model")
    loaded = DQN.load(tmp_path / "model", env=make_vec_env("CartPole-v1"), device="cpu")
    loaded.predict(np.zeros((1, 4), np.float32))
    assert loaded.replay_buffer.size() == 0
    with pytest.raises(
        ConfigurationError, match=r"in use by another buffer, of this process or another one\. Close that buffer"
    ):
        loaded.learn(50)
    model.learn(30, reset_num_timesteps=False)
    size = model.replay_buffer.size()
    assert size >= 80
    model.replay_buffer.close()
    again = DQN.load(tmp_path / "model", env=make_vec_env("CartPole-v1"), device="cpu")
    assert again.replay_buffer.size() == size
    again.learn(20, reset_num_timesteps=False)


def test_a_model_can_be_evaluated_in_another_number_of_environments(tmp_path: Path) -> None:
    model = model_on_disk(tmp_path, n_envs=4)
    model.learn(80)
    model.save(tmp_path / "model")
    model.replay_buffer.close()
    files = sorted(entry.name for entry in (tmp_path / "buffer").iterdir())
    loaded = DQN.load(tmp_path / "model", env=make_vec_env("CartPole-v1", 1), device="cpu")
    with pytest.raises(ConfigurationError, match="made with other arguments: n_envs"):
        loaded.learn(50)
    assert files == sorted(entry.name for entry in (tmp_path / "buffer").iterdir())
    assert CompressedReplayBuffer.load(tmp_path / "buffer").size() == 20
    del loaded
    gc.collect()
    assert CompressedReplayBuffer.load(tmp_path / "buffer").size() == 20


def test_a_model_can_be_loaded_where_its_folder_cannot_be(tmp_path: Path) -> None:
    """On another machine, say."""
    model = model_on_disk(tmp_path)
    model.save(tmp_path / "model")
    model.replay_buffer.close()
    for entry in (tmp_path / "buffer").iterdir():
        entry.unlink()
    (tmp_path / "buffer").rmdir()
    (tmp_path / "buffer").touch()
    loaded = DQN.load(tmp_path / "model", env=make_vec_env("CartPole-v1"), device="cpu")
    with pytest.raises(ConfigurationError, match="buffer cannot be used: File exists"):
        loaded.learn(20)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "name",
    ["CompressedReplayBuffer", "CompressedPrioritizedReplayBuffer", "CompressedHerReplayBuffer"],
)
def test_a_detached_buffer_says_why_it_cannot_be_used(name: str, use: str, tmp_path: Path) -> None:
    owner = filled(tmp_path / "folder", name=name)
    owner.flush()
    files = sorted((entry.name, entry.stat().st_size) for entry in (tmp_path / "folder").iterdir())
    detached = on_disk(tmp_path / "folder", name=name)
    with pytest.raises(ConfigurationError, match="in use by another buffer"):
        USES[use](detached, tmp_path)
    assert detached.size() == 0
    assert not (tmp_path / "file").exists()
    detached.close()
    assert files == sorted((entry.name, entry.stat().st_size) for entry in (tmp_path / "folder").iterdir())
    with pytest.raises(ConfigurationError, match="in use by another buffer"):
        type(owner).load(tmp_path / "folder")
    owner.close()


def test_a_checkpoint_of_a_detached_buffer_is_refused(tmp_path: Path) -> None:
    model = model_on_disk(tmp_path)
    model.learn(50, callback=CheckpointBufferCallback(50, tmp_path / "checkpoints"))
    other = model_on_disk(tmp_path)
    callback = CheckpointBufferCallback(50, tmp_path / "checkpoints")
    callback.init_callback(other)
    with pytest.raises(ConfigurationError, match="in use"):
        callback.save()
    resumed = CheckpointBufferCallback.resume(DQN, tmp_path / "checkpoints", device="cpu")
    assert resumed is not None
    assert resumed.replay_buffer.size() == model.replay_buffer.size()


def test_a_buffer_that_could_not_be_opened_overwrites_nothing(tmp_path: Path) -> None:
    filled(tmp_path).close()
    state = (tmp_path / "state").read_bytes()
    (tmp_path / "state").write_bytes(state[:-1])
    with pytest.raises(CorruptDataError):
        on_disk(tmp_path)
    gc.collect()
    assert (tmp_path / "state").read_bytes() == state[:-1]
    (tmp_path / "state").write_bytes(state)
    assert on_disk(tmp_path).size() == 20  # neither is the folder still locked
