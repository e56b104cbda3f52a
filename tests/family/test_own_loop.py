"""Loops that are not SB3's: what a step may look like when there is one environment, and other kinds of ``infos``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer

import sb3_extra_buffers.compressed as compressed
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer

SPACES: dict[str, spaces.Space[Any]] = {
    "images": spaces.Box(0, 255, (2, 12, 13), np.uint8),
    "vectors": spaces.Box(-1, 1, (3,), np.float32),
    "Discrete": spaces.Discrete(5),
    "MultiBinary": spaces.MultiBinary(3),
    "Dict": spaces.Dict({"image": spaces.Box(0, 255, (2, 12, 13), np.uint8), "vector": spaces.Box(-1, 1, (3,))}),
}
ACTIONS = {"Discrete": spaces.Discrete(3), "Box": spaces.Box(-1, 1, (2,), np.float32)}
CLASSES: dict[str, Any] = {
    "CompressedReplayBuffer": ReplayBuffer,
    "CompressedNStepReplayBuffer": NStepReplayBuffer,
    "CompressedPrioritizedReplayBuffer": ReplayBuffer,
    "CompressedSequenceReplayBuffer": ReplayBuffer,
    "GpuReplayBuffer": ReplayBuffer,
}


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("name", CLASSES)
def test_a_single_environment_needs_no_axis(name: str, space: str, actions: str) -> None:
    model, options = CLASSES[name], {"length": 4} if "Sequence" in name else {}
    if space == "Dict":
        if name in ("CompressedNStepReplayBuffer", "GpuReplayBuffer"):
            return
        name, model = name.replace("Compressed", "CompressedDict"), DictReplayBuffer
    cls: Any = GpuReplayBuffer if name == "GpuReplayBuffer" else getattr(compressed, name)
    ours = cls(20, SPACES[space], ACTIONS[actions], "cpu", **options)
    theirs = model(20, SPACES[space], ACTIONS[actions], "cpu")
    SPACES[space].seed(0)
    ACTIONS[actions].seed(0)
    obs = SPACES[space].sample()
    for number in range(30):
        next_obs, action = SPACES[space].sample(), ACTIONS[actions].sample()
        for buffer in (ours, theirs):
            buffer.add(obs, next_obs, np.asarray(action), float(number), number % 7 == 6, [{}])
        obs = next_obs
    for field in ("actions", "rewards", "dones"):
        np.testing.assert_array_equal(np.asarray(getattr(ours, field)), getattr(theirs, field))
    for column in ("observations", "next_observations"):
        left, right = getattr(ours, column), getattr(theirs, column)
        for key in right if isinstance(right, dict) else [None]:
            mine, expected = (left, right) if key is None else (left[key], right[key])
            np.testing.assert_array_equal(np.asarray(mine[:]), expected)


def test_infos_of_vector_environments_are_refused_with_advice() -> None:
    buffer = compressed.CompressedReplayBuffer(20, SPACES["vectors"], ACTIONS["Discrete"], "cpu", n_envs=2)
    step = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32), np.array([0, 1]), np.ones(2), np.zeros(2)
    infos: Any = {"episode": {"r": np.zeros(2)}}
    with pytest.raises(ConfigurationError, match="must be a list with a dict for each environment, not dict"):
        buffer.add(*step, infos)
    assert buffer.size() == 0
    buffer = compressed.CompressedReplayBuffer(
        20, SPACES["vectors"], ACTIONS["Discrete"], "cpu", n_envs=2, handle_timeout_termination=False
    )
    buffer.add(*step, infos)  # as CleanRL does
    assert buffer.size() == 1
