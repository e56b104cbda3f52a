"""What a buffer costs, in SB3's logs."""

from __future__ import annotations

import csv
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure

from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.training_utils.callbacks import BufferStatsCallback
from tests.environments import SpaceEnv

IMAGES = spaces.Box(0, 255, (4, 12, 12), np.uint8)
TIMES = {"buffer/add_microseconds", "buffer/sample_microseconds"}
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


def logged(model: Any, folder: Path, formats: tuple[str, ...] = ("csv",), callback: Any = None) -> dict[str, float]:
    """What the log of a short run ends with. (Where two episodes end in one step, SB3 writes two rows.)"""
    model.set_logger(configure(str(folder), list(formats)))
    model.learn(300, callback=[BufferStatsCallback(), *([callback] if callback else [])], log_interval=1)
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
    model = make()
    row = logged(model, tmp_path)
    assert set(row) >= (TIMES | MEMORY)
    buffer = getattr(model, "replay_buffer", None) or model.rollout_buffer
    assert row["buffer/ratio"] > 1.0
    assert 0 < row["buffer/bytes"] < 400 * 600 * 2
    assert 0 < row["buffer/add_microseconds"] < 1e6
    assert 0 < row["buffer/sample_microseconds"] < 1e6
    assert not {"add", "sample", "get"} & set(vars(buffer))


@pytest.mark.parametrize("make", [dqn, ppo], ids=["replay", "rollout"])
def test_a_buffer_of_sb3(make: Any, tmp_path: Path) -> None:
    row = logged(make(), tmp_path)
    assert (TIMES | {"buffer/bytes"}) <= set(row)
    assert "buffer/ratio" not in row


class SaveInBetween(BaseCallback):
    def _on_step(self) -> bool:
        if self.n_calls == 100:
            self.saved = pickle.dumps(self.model.replay_buffer)  # type: ignore[attr-defined]
        return True


def test_a_buffer_can_be_saved_while_it_is_watched(tmp_path: Path) -> None:
    model, saver = dqn(replay_buffer_class=CompressedReplayBuffer), SaveInBetween()
    logged(model, tmp_path, callback=saver)
    buffer = pickle.loads(saver.saved)
    n = buffer.size()
    assert n > 90
    np.testing.assert_array_equal(buffer.observations[:n], model.replay_buffer.observations[:n])
    buffer.add(*(np.zeros((2, 4, 12, 12), np.uint8),) * 2, np.zeros((2, 1)), np.zeros(2), np.zeros(2), [{}, {}])
    assert buffer.size() == n + 1
    assert model.replay_buffer.size() > n + 1


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged(dqn(replay_buffer_class=CompressedReplayBuffer), tmp_path, ("csv", "tensorboard"))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= (TIMES | MEMORY)
