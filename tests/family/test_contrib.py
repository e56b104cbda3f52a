"""sb3-contrib: its rollout buffers batch by batch, and all of its algorithms with compressed buffers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import QRDQN, TQC, TRPO, CrossQ, MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.compressed.maskable_buffer import (
    CompressedMaskableDictRolloutBuffer,
    CompressedMaskableRolloutBuffer,
)
from sb3_extra_buffers.compressed.recurrent_buffer import (
    CompressedRecurrentDictRolloutBuffer,
    CompressedRecurrentPPO,
    CompressedRecurrentRolloutBuffer,
)
from tests.environments import SpaceEnv
from tests.family.helpers import (
    DICT,
    METHODS,
    SLOTS,
    STACK,
    VECTOR,
    VECTORS,
    assert_same_training,
    small_net,
    transitions,
    vec_env,
)
from tests.transitions import Transition, assert_same, copied

ACTIONS = {
    "Discrete": spaces.Discrete(5),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiBinary": spaces.MultiBinary(3),
}
SPACES = {"Box": STACK, "Dict": DICT}
N_ENVS = 2


def fill(buffers: list[RolloutBuffer], transition: Transition, **kwargs: Any) -> None:
    value, log_prob = th.tensor(transition.reward * 2), th.tensor(transition.reward - 1)
    for buffer in buffers:
        obs, _, action, reward, done, _ = copied(transition)
        buffer.add(obs, action, reward, done, value, log_prob, **kwargs)


def assert_same_rollouts(
    buffers: list[RolloutBuffer], kwargs_of_step: Any, action_space: spaces.Space, space: Any
) -> None:
    """Two rollouts, each read twice: whole and in batches that do not divide it."""
    steps = transitions(space, 2 * SLOTS, N_ENVS, action_space=action_space)
    for rollout in range(2):
        for buffer in buffers:
            buffer.reset()
        for count in range(SLOTS):
            fill(buffers, next(steps), **kwargs_of_step(count))
        for buffer in buffers:
            buffer.compute_returns_and_advantage(th.arange(N_ENVS, dtype=th.float32), np.array([True, False]))
        for batch_size in (None, 17):
            batches = []
            for buffer in buffers:
                np.random.seed(rollout)
                batches.append(list(buffer.get(batch_size)))
            for actual, expected in zip(*batches, strict=True):
                assert_same(actual, expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("space", SPACES)
def test_same_masked_batches(space: str, method: str) -> None:
    plain, compressed = MaskableRolloutBuffer, CompressedMaskableRolloutBuffer
    if space == "Dict":
        plain, compressed = MaskableDictRolloutBuffer, CompressedMaskableDictRolloutBuffer
    rng = np.random.default_rng(0)
    for action_space, n_choices in (
        (ACTIONS["Discrete"], 5),
        (ACTIONS["MultiDiscrete"], 7),
        (ACTIONS["MultiBinary"], 6),
    ):
        arguments = (SLOTS, SPACES[space], action_space, "cpu", 0.8, 0.9, N_ENVS)
        buffers = [plain(*arguments), compressed(*arguments, compression_method=method)]
        masks = rng.integers(0, 2, size=(SLOTS, N_ENVS, n_choices))

        def step(count: int, masks: np.ndarray = masks) -> dict[str, Any]:
            return {} if count % 5 == 0 else {"action_masks": masks[count]}

        assert_same_rollouts(buffers, step, action_space, SPACES[space])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("space", SPACES)
def test_same_recurrent_batches(space: str, method: str) -> None:
    plain, compressed = RecurrentRolloutBuffer, CompressedRecurrentRolloutBuffer
    if space == "Dict":
        plain, compressed = RecurrentDictRolloutBuffer, CompressedRecurrentDictRolloutBuffer
    state_shape = (1, N_ENVS, 6)
    arguments = (SLOTS, SPACES[space], ACTIONS["Discrete"], (SLOTS, *state_shape), "cpu", 0.8, 0.9, N_ENVS)
    buffers = [plain(*arguments), compressed(*arguments, compression_method=method)]

    def step(count: int) -> dict[str, Any]:
        states = th.split(th.sin(count + th.arange(24.0)), 6)
        first, second, third, fourth = (state.expand(state_shape) for state in states)
        return {"lstm_states": RNNStates((first, second), (third, fourth))}

    assert_same_rollouts(buffers, step, ACTIONS["Discrete"], SPACES[space])


class MaskedEnv(SpaceEnv):
    """Allows all actions but one, another one at every step."""

    def action_masks(self) -> list[bool]:
        return [action != self.steps % 3 for action in range(3)]


@pytest.mark.parametrize("space", [VECTOR, VECTORS], ids=["Box", "Dict"])
def test_maskable_ppo(space: spaces.Space) -> None:
    policy, compressed = "MlpPolicy", CompressedMaskableRolloutBuffer
    if isinstance(space, spaces.Dict):
        policy, compressed = "MultiInputPolicy", CompressedMaskableDictRolloutBuffer

    def make(cls: type | None, **kwargs: Any) -> MaskablePPO:
        env = DummyVecEnv([lambda: MaskedEnv(space)] * 2)
        arguments = {"n_steps": 40, "batch_size": 16, "n_epochs": 2, "policy_kwargs": small_net(), "seed": 0}
        return MaskablePPO(policy, env, rollout_buffer_class=cls, rollout_buffer_kwargs=kwargs, **arguments)

    assert_same_training(lambda: make(None), lambda: make(compressed, compression_method="delta"), steps=160)


@pytest.mark.parametrize("space", [VECTOR, VECTORS], ids=["Box", "Dict"])
def test_recurrent_ppo(space: spaces.Space) -> None:
    policy = "MultiInputLstmPolicy" if isinstance(space, spaces.Dict) else "MlpLstmPolicy"
    small = small_net(lstm_hidden_size=8)
    arguments = {"n_steps": 40, "batch_size": 16, "n_epochs": 2, "policy_kwargs": small, "gamma": 0.9, "seed": 0}

    def compressed() -> CompressedRecurrentPPO:
        kwargs = {"compression_method": "zstd"}
        return CompressedRecurrentPPO(policy, vec_env(space, 2), rollout_buffer_kwargs=kwargs, **arguments)

    assert_same_training(lambda: RecurrentPPO(policy, vec_env(space, 2), **arguments), compressed, steps=160)


def test_recurrent_ppo_saves_its_buffer_arguments(tmp_path: Any) -> None:
    arguments: dict[str, Any] = {"n_steps": 8, "batch_size": 8, "policy_kwargs": small_net(lstm_hidden_size=8)}
    kwargs = {"compression_method": "zstd-5", "frame_stack": None}
    model = CompressedRecurrentPPO("MlpLstmPolicy", vec_env(VECTOR), rollout_buffer_kwargs=kwargs, **arguments)
    model.save(tmp_path / "model")
    loaded = CompressedRecurrentPPO.load(tmp_path / "model", env=vec_env(VECTOR))
    assert type(loaded.rollout_buffer) is CompressedRecurrentRolloutBuffer
    assert loaded.rollout_buffer.observations.store.label == "zstd-5"
    loaded.learn(16)


SMALL = {"learning_starts": 30, "buffer_size": 80, "batch_size": 8, "policy_kwargs": small_net()}
ALGORITHMS: dict[type[BaseAlgorithm], tuple[spaces.Space, dict[str, Any]]] = {
    QRDQN: (spaces.Discrete(3), {**SMALL, "policy_kwargs": small_net(n_quantiles=5)}),
    TQC: (spaces.Box(-1, 1, (2,), np.float32), {**SMALL, "train_freq": 4}),
    CrossQ: (spaces.Box(-1, 1, (2,), np.float32), {**SMALL, "train_freq": 4}),
    TRPO: (spaces.Discrete(3), {"n_steps": 40, "batch_size": 16, "policy_kwargs": small_net()}),
}


@pytest.mark.parametrize("cls", ALGORITHMS, ids=lambda cls: cls.__name__)
def test_algorithms_with_plain_buffers(cls: type[BaseAlgorithm]) -> None:
    action_space, arguments = ALGORITHMS[cls]
    kind, buffer = ("rollout", CompressedRolloutBuffer) if cls is TRPO else ("replay", CompressedReplayBuffer)
    options = {f"{kind}_buffer_class": buffer, f"{kind}_buffer_kwargs": {"compression_method": "delta"}}

    def make(**kwargs: Any) -> BaseAlgorithm:
        return cls("MlpPolicy", vec_env(STACK, 2, action_space=action_space), seed=0, **arguments, **kwargs)

    assert_same_training(make, lambda: make(**options), steps=120)


WITHOUT_CONTRIB = """
import sys
sys.modules["sb3_contrib"] = None
import sb3_extra_buffers.compressed as compressed
compressed.CompressedNStepReplayBuffer, compressed.CompressedHerReplayBuffer, compressed.PrioritizedDQN
for name in {names}:
    try:
        getattr(compressed, name)
    except ImportError as error:
        assert type(error).__name__ == "MissingPackageError", error
        assert 'pip install "sb3-extra-buffers[contrib]"' in str(error), error
    else:
        raise AssertionError(name)
"""


def test_without_contrib() -> None:
    names = [
        *("CompressedMaskableRolloutBuffer", "CompressedMaskableDictRolloutBuffer"),
        *("CompressedRecurrentRolloutBuffer", "CompressedRecurrentDictRolloutBuffer", "CompressedRecurrentPPO"),
    ]
    subprocess.run([sys.executable, "-c", WITHOUT_CONTRIB.format(names=names)], check=True)
