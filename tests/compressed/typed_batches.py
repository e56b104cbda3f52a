"""What a type checker knows of batches. mypy checks this file; nothing in it is meant to be run."""

from __future__ import annotations

from stable_baselines3.common.type_aliases import (
    DictReplayBufferSamples,
    DictRolloutBufferSamples,
    ReplayBufferSamples,
    RolloutBufferSamples,
)
from typing_extensions import assert_type

from sb3_extra_buffers import (
    CompressedDictNStepReplayBuffer,
    CompressedDictReplayBuffer,
    CompressedDictRolloutBuffer,
    CompressedHerReplayBuffer,
    CompressedNStepReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
    GpuDictReplayBuffer,
    GpuReplayBuffer,
)
from sb3_extra_buffers.compressed import PrioritizedReplayBufferSamples


def batches(
    replay: CompressedReplayBuffer,
    replay_dict: CompressedDictReplayBuffer,
    n_step: CompressedNStepReplayBuffer,
    n_step_dict: CompressedDictNStepReplayBuffer,
    her: CompressedHerReplayBuffer,
    prioritized: CompressedPrioritizedReplayBuffer,
    rollout: CompressedRolloutBuffer,
    rollout_dict: CompressedDictRolloutBuffer,
    gpu: GpuReplayBuffer,
    gpu_dict: GpuDictReplayBuffer,
) -> None:
    assert_type(replay.sample(4), ReplayBufferSamples)
    assert_type(replay_dict.sample(4), DictReplayBufferSamples)
    assert_type(n_step.sample(4), ReplayBufferSamples)
    assert_type(n_step_dict.sample(4), DictReplayBufferSamples)
    assert_type(her.sample(4), DictReplayBufferSamples)
    assert_type(prioritized.sample(4), PrioritizedReplayBufferSamples)
    assert_type(next(rollout.get(4)), RolloutBufferSamples)
    assert_type(next(rollout_dict.get(4)), DictRolloutBufferSamples)
    assert_type(gpu.sample(4), ReplayBufferSamples)
    assert_type(gpu_dict.sample(4), DictReplayBufferSamples)
