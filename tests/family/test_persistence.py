"""Every class of the family can be saved and loaded, samples the same afterwards, and goes on training."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.envs import BitFlippingEnv

from sb3_extra_buffers.compressed.her_buffer import CompressedHerReplayBuffer
from sb3_extra_buffers.compressed.maskable_buffer import (
    CompressedMaskableDictRolloutBuffer,
    CompressedMaskableRolloutBuffer,
)
from sb3_extra_buffers.compressed.nstep_buffer import CompressedDictNStepReplayBuffer, CompressedNStepReplayBuffer
from sb3_extra_buffers.compressed.prioritized_dqn import PrioritizedDQN
from sb3_extra_buffers.compressed.recurrent_buffer import (
    CompressedRecurrentDictRolloutBuffer,
    CompressedRecurrentRolloutBuffer,
)
from tests.environments import SpaceEnv
from tests.family.helpers import DICT, METHODS, SLOTS, STACK, VECTORS, small_net, transitions
from tests.transitions import assert_same, copied

ARGUMENTS: dict[str, Any] = {"learning_starts": 20, "buffer_size": 60, "batch_size": 8, "policy_kwargs": small_net()}


def make(name: str, method: str) -> DQN:
    cls, policy, env, buffer_class, kwargs = {
        "n-step": (DQN, "MlpPolicy", SpaceEnv(STACK), CompressedNStepReplayBuffer, {"n_steps": 2}),
        "n-step, Dict": (DQN, "MultiInputPolicy", SpaceEnv(VECTORS), CompressedDictNStepReplayBuffer, {}),
        "HER": (DQN, "MultiInputPolicy", BitFlippingEnv(4, continuous=False), CompressedHerReplayBuffer, {}),
        "prioritized": (
            PrioritizedDQN,
            "MlpPolicy",
            SpaceEnv(STACK),
            None,
            {"beta": lambda progress: 1 - progress / 2},
        ),
        "prioritized, Dict": (PrioritizedDQN, "MultiInputPolicy", SpaceEnv(VECTORS), None, {"n_steps": 2}),
    }[name]
    return cls(
        policy,
        env,
        replay_buffer_class=buffer_class,
        replay_buffer_kwargs={**kwargs, "compression_method": method},
        seed=0,
        **ARGUMENTS,
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["n-step", "n-step, Dict", "HER", "prioritized", "prioritized, Dict"])
def test_replay_buffers(name: str, method: str, tmp_path: Path) -> None:
    model = make(name, method)
    model.learn(80)
    if name == "HER" and (model.replay_buffer._current_ep_start != model.replay_buffer.pos).any():
        with pytest.warns(UserWarning, match="will be truncated"):
            model.replay_buffer.truncate_last_trajectory()
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = type(model).load(tmp_path / "model", env=model.get_env())
    loaded.load_replay_buffer(tmp_path / "buffer")
    assert type(loaded.replay_buffer) is type(model.replay_buffer)
    batches = []
    for buffer in (model.replay_buffer, loaded.replay_buffer):
        np.random.seed(1)
        batches.append(tuple(buffer.sample(30)))
    assert_same(*batches)
    loaded.learn(60, reset_num_timesteps=False)
    assert loaded.replay_buffer.full


@pytest.mark.parametrize(
    ("cls", "space"),
    [
        (CompressedMaskableRolloutBuffer, STACK),
        (CompressedMaskableDictRolloutBuffer, DICT),
        (CompressedRecurrentRolloutBuffer, STACK),
        (CompressedRecurrentDictRolloutBuffer, DICT),
    ],
)
def test_rollout_buffers(cls: type[RolloutBuffer], space: spaces.Space) -> None:
    """Pickled in the middle of a rollout."""
    state = th.ones(1, 1, 4)
    extra, arguments = {"action_masks": np.array([[1, 0, 1]])}, {}
    if "Recurrent" in cls.__name__:
        extra = {"lstm_states": RNNStates((state, state), (state, state))}
        arguments = {"hidden_state_shape": (SLOTS, 1, 1, 4)}
    buffers = [cls(SLOTS, space, spaces.Discrete(3), device="cpu", **arguments)]
    for count, transition in enumerate(transitions(space, SLOTS)):
        if count == SLOTS - 3:
            buffers.append(pickle.loads(pickle.dumps(buffers[0])))
        for buffer in buffers:
            obs, _, action, reward, done, _ = copied(transition)
            buffer.add(obs, action, reward, done, th.ones(1), th.zeros(1), **extra)
    batches = []
    for buffer in buffers:
        np.random.seed(0)
        batches.append(next(buffer.get(16)))
    assert_same(*batches)
