"""The memory of a buffer, in SB3's logs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import SimpleMultiObsEnv
from stable_baselines3.common.logger import configure

from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.training_utils.callbacks import BufferStatsCallback
from tests.environments import SpaceEnv

IMAGES = spaces.Box(0, 255, (4, 12, 12), np.uint8)
MEMORY = {"buffer/ratio", "buffer/bytes", "buffer/bytes_per_transition"}


def env() -> Any:
    return make_vec_env(lambda: SpaceEnv(IMAGES), n_envs=2, seed=0)


def dqn(**kwargs: Any) -> DQN:
    return DQN(
        "MlpPolicy", env(), buffer_size=400, learning_starts=20, policy_kwargs={"net_arch": [4]}, device="cpu", **kwargs
    )


def ppo(**kwargs: Any) -> PPO:
    return PPO(
        "MlpPolicy",
        env(),
        n_steps=50,
        batch_size=20,
        n_epochs=1,
        policy_kwargs={"net_arch": [4]},
        device="cpu",
        **kwargs,
    )


def logged(model: Any, folder: Path, formats: tuple[str, ...] = ("csv",)) -> dict[str, float]:
    """What the log of a short run ends with. (Where two episodes end in one step, SB3 writes two rows.)"""
    model.set_logger(configure(str(folder), list(formats)))
    model.learn(300, callback=BufferStatsCallback(), log_interval=1)
    model.logger.close()
    with (folder / "progress.csv").open() as file:
        return {key: float(value) for row in csv.DictReader(file) for key, value in row.items() if value}


@pytest.mark.parametrize(
    "make",
    [
        lambda: dqn(replay_buffer_class=CompressedReplayBuffer),
        lambda: ppo(rollout_buffer_class=CompressedRolloutBuffer),
    ],
    ids=["replay", "rollout"],
)
def test_a_compressed_buffer(make: Any, tmp_path: Path) -> None:
    row = logged(make(), tmp_path)
    assert set(row) >= MEMORY
    assert row["buffer/ratio"] > 1.0
    assert 0 < row["buffer/bytes"] < 400 * 600 * 2


@pytest.mark.parametrize("make", [dqn, ppo], ids=["replay", "rollout"])
def test_a_buffer_of_sb3(make: Any, tmp_path: Path) -> None:
    row = logged(make(), tmp_path)
    assert row["buffer/bytes"] > 0
    assert "buffer/ratio" not in row


def test_dict_observations_of_a_buffer_of_sb3_count(tmp_path: Path) -> None:
    model = DQN("MultiInputPolicy", SimpleMultiObsEnv(), buffer_size=100, learning_starts=1_000, device="cpu")
    row = logged(model, tmp_path)
    assert row["buffer/bytes"] > 100 * 2 * sum(
        space.sample().nbytes for space in model.observation_space.spaces.values()
    )


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged(dqn(replay_buffer_class=CompressedReplayBuffer), tmp_path, ("csv", "tensorboard"))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= MEMORY
