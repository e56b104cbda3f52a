"""The clock that tells how much of a training is spent in its buffer."""

from __future__ import annotations

import time
from typing import Any

import pytest
from stable_baselines3 import DQN, PPO

from benchmarks.sections.training import BufferClock
from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.measure.training import hash_of


def make_model(algorithm: str, compressed: bool) -> Any:
    if algorithm == "DQN":
        kind: Any = {"replay_buffer_class": CompressedReplayBuffer} if compressed else {}
        return DQN("MlpPolicy", "CartPole-v1", learning_starts=50, seed=0, device="cpu", **kind)
    kind = {"rollout_buffer_class": CompressedRolloutBuffer} if compressed else {}
    return PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=2, seed=0, device="cpu", **kind)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("algorithm", ["DQN", "PPO"])
def test_the_time_in_a_buffer_is_a_part_of_the_training_and_measuring_it_changes_nothing(
    algorithm: str, compressed: bool
) -> None:
    plain = make_model(algorithm, compressed)
    plain.learn(192)
    watched = make_model(algorithm, compressed)
    clock = BufferClock(watched)
    began = time.perf_counter()
    watched.learn(192)
    assert 192e-6 < clock.seconds < time.perf_counter() - began
    assert hash_of(plain.policy) == hash_of(watched.policy)


def test_what_is_done_with_a_batch_of_a_rollout_is_not_counted() -> None:
    model = make_model("PPO", compressed=False)
    model.learn(64)
    clock = BufferClock(model)
    for _ in model.rollout_buffer.get(32):
        time.sleep(0.05)
    assert 0 < clock.seconds < 0.05
