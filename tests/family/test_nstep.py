"""n-step returns: the same as SB3's, and an error or a warning where they are asked for but not given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import stable_baselines3
from gymnasium import spaces
from stable_baselines3 import DQN, TD3
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.compressed import CompressedDictReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.compressed.her_buffer import CompressedHerReplayBuffer
from sb3_extra_buffers.compressed.nstep_buffer import CompressedDictNStepReplayBuffer, CompressedNStepReplayBuffer
from sb3_extra_buffers.compressed.prioritized_dqn import PrioritizedDQN
from sb3_extra_buffers.errors import ArgumentError, ConfigurationError
from tests.environments import SpaceEnv
from tests.family.helpers import (
    DICT,
    METHODS,
    SLOTS,
    STACK,
    VECTOR,
    assert_same_training,
    small_net,
    transitions,
    vec_env,
)
from tests.transitions import add_to_replay, assert_same, sample_both

LOOK_AFTER = (1, 2, 20, SLOTS - 1, SLOTS, SLOTS + 1, 3 * SLOTS + 5)


def pair(space: spaces.Space, n_envs: int, **kwargs: Any) -> list[NStepReplayBuffer]:
    arguments = (SLOTS * n_envs, space, spaces.Discrete(5), "cpu", n_envs)
    method = kwargs.pop("compression_method", "delta")
    return [
        NStepReplayBuffer(*arguments, **kwargs),
        CompressedNStepReplayBuffer(*arguments, compression_method=method, **kwargs),
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_same_batches(method: str, n_envs: int) -> None:
    buffers = pair(STACK, n_envs, compression_method=method, n_steps=3, gamma=0.9)
    for count, transition in enumerate(transitions(STACK, LOOK_AFTER[-1], n_envs), 1):
        add_to_replay(buffers, transition)
        if count in LOOK_AFTER:
            sample_both(*buffers, batch_size=50, seed=count)


@pytest.mark.parametrize("n_steps", [1, 2, SLOTS - 1, SLOTS, 3 * SLOTS])
@pytest.mark.parametrize("episode_end", [0.0, 0.3], ids=["no episode ends", "short episodes"])
def test_any_number_of_steps(n_steps: int, episode_end: float) -> None:
    buffers = pair(VECTOR, 2, n_steps=n_steps, handle_timeout_termination=n_steps != 2)
    for count, transition in enumerate(transitions(VECTOR, LOOK_AFTER[-1], 2, episode_end=episode_end), 1):
        add_to_replay(buffers, transition)
        if count in LOOK_AFTER:
            sample_both(*buffers, batch_size=50, seed=count)


def test_normalized_rewards_and_observations() -> None:
    env = VecNormalize(vec_env(VECTOR, 2))
    env.reset()
    for _ in range(20):
        env.step(np.zeros(2, dtype=int))
    buffers = pair(VECTOR, 2)
    for transition in transitions(VECTOR, 60, 2):
        add_to_replay(buffers, transition)
    sample_both(*buffers, batch_size=50, seed=0, env=env)


def test_sampling_changes_nothing() -> None:
    _, buffer = buffers = pair(VECTOR, 1)
    for transition in transitions(VECTOR, 55):
        add_to_replay(buffers, transition)
    before = buffer.timeouts.copy()
    buffer.timeouts.flags.writeable = False
    buffer.sample(10)
    assert_same(buffer.timeouts, before)


@pytest.mark.parametrize("n_steps", [1, 4])
def test_dict_is_each_key_on_its_own(n_steps: int) -> None:
    arguments = (spaces.Discrete(5), "cpu", 2)
    plain = {
        key: NStepReplayBuffer(2 * SLOTS, space, *arguments, n_steps=n_steps) for key, space in DICT.spaces.items()
    }
    buffer = CompressedDictNStepReplayBuffer(2 * SLOTS, DICT, *arguments, n_steps=n_steps)
    for transition in transitions(DICT, 100, 2):
        for key, part in plain.items():
            part.add(transition.obs[key], transition.next_obs[key], *transition[2:])
        add_to_replay([buffer], transition)
    np.random.seed(0)
    batch = buffer.sample(60)
    for key, part in plain.items():
        np.random.seed(0)
        expected = part.sample(60)
        assert_same(batch.observations[key], expected.observations)
        assert_same(batch.next_observations[key], expected.next_observations)
        assert_same(batch[3:], expected[3:])
        assert_same(batch.actions, expected.actions)


@pytest.mark.parametrize("space", [STACK, DICT], ids=["Box", "Dict"])
def test_memory_optimisation(space: spaces.Space) -> None:
    """It only loses observations after the end of an episode, which no target depends on."""
    cls = CompressedDictNStepReplayBuffer if isinstance(space, spaces.Dict) else CompressedNStepReplayBuffer
    plain, optimized = (
        cls(
            2 * SLOTS,
            space,
            spaces.Discrete(5),
            "cpu",
            2,
            optimize_memory_usage=option,
            handle_timeout_termination=False,
        )
        for option in (False, True)
    )
    for transition in transitions(space, 130, 2, surprise=0.0):
        add_to_replay([plain, optimized], transition)
    slots = np.array([slot for slot in range(SLOTS) if slot != plain.pos])
    np.random.seed(0)
    expected = plain._get_samples(slots)
    np.random.seed(0)
    actual = optimized._get_samples(slots)
    assert_same(actual.observations, expected.observations)
    assert_same(actual[3:], expected[3:])
    goes_on = (expected.dones == 0).flatten()
    assert 0 < goes_on.sum() < len(slots)
    if isinstance(space, spaces.Dict):
        for key in space.spaces:
            assert_same(actual.next_observations[key][goes_on], expected.next_observations[key][goes_on])
    else:
        assert_same(actual.next_observations[goes_on], expected.next_observations[goes_on])
    assert len(optimized.sample(100).rewards) == 100


def test_same_training() -> None:
    arguments = {"learning_starts": 20, "buffer_size": 100, "batch_size": 16, "policy_kwargs": small_net(), "seed": 0}

    def compressed() -> DQN:
        kwargs = {"n_steps": 3, "gamma": 0.9, "compression_method": "delta"}
        return DQN(
            "MlpPolicy",
            vec_env(STACK, 2),
            gamma=0.9,
            replay_buffer_class=CompressedNStepReplayBuffer,
            replay_buffer_kwargs=kwargs,
            **arguments,
        )

    assert_same_training(
        lambda: DQN("MlpPolicy", vec_env(STACK, 2), gamma=0.9, n_steps=3, **arguments), compressed, steps=200
    )


@pytest.mark.parametrize(
    ("space", "cls"),
    [(VECTOR, CompressedReplayBuffer), (DICT, CompressedDictReplayBuffer), (DICT, CompressedHerReplayBuffer)],
    ids=["Box", "Dict", "HER"],
)
def test_a_buffer_without_n_step_returns_refuses_n_steps(space: spaces.Space, cls: Any) -> None:
    arguments = {"env": None} if cls is CompressedHerReplayBuffer else {}
    with pytest.raises(
        ArgumentError,
        match=rf"{cls.__name__}\(\) got .*'n_steps'. For n-step returns, use CompressedNStepReplayBuffer or Compressed",
    ):
        cls(10, space, spaces.Discrete(2), **arguments, n_steps=3)


@pytest.mark.skipif(
    tuple(map(int, stable_baselines3.__version__.split(".")[:2])) < (2, 9), reason="SB3 warns since 2.9"
)
@pytest.mark.parametrize("cls", [CompressedReplayBuffer, CompressedNStepReplayBuffer])
def test_sb3_warns_that_it_does_not_pass_on_the_n_steps_of_an_algorithm(cls: type) -> None:
    env = SpaceEnv(VECTOR, spaces.Box(-1, 1, (2,), np.float32))
    with pytest.warns(UserWarning, match="`n_steps=5` is ignored"):
        TD3("MlpPolicy", env, n_steps=5, buffer_size=10, replay_buffer_class=cls)


def test_a_prioritized_dqn_refuses_two_numbers_of_steps() -> None:
    with pytest.raises(ConfigurationError, match="was given n_steps=5, but its replay_buffer_kwargs say 3"):
        PrioritizedDQN("MlpPolicy", SpaceEnv(VECTOR), n_steps=5, buffer_size=10, replay_buffer_kwargs={"n_steps": 3})


def test_impossible_number_of_steps() -> None:
    with pytest.raises(ConfigurationError, match="n_steps must be at least 1, not 0"):
        CompressedNStepReplayBuffer(10, VECTOR, spaces.Discrete(2), n_steps=0)
