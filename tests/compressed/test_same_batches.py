"""Whatever SB3's buffer returns under a seed, a compressed one returns too: values, shapes, dtypes and devices."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_extra_buffers import compiled
from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
)
from tests.compressed.pairs import (
    IMAGES,
    LOOK_AFTER,
    SLOTS,
    SPACES,
    check_replay,
    check_rollout,
    recorded,
    replay_pair,
    rollout_pair,
)
from tests.environments import SpaceEnv
from tests.methods import METHODS, installed
from tests.transitions import (
    Transition,
    add_to_replay,
    add_to_rollout,
    assert_same,
    copied,
    play,
    sample_both,
)

NUMBER = spaces.Box(-1, 1, (), np.float64)


@pytest.mark.parametrize(
    ("method", "n_envs"),
    [(method, n_envs) for method in METHODS for n_envs in (1, 3)],
)
@pytest.mark.parametrize("space", SPACES)
class TestEveryMethodAndSpace:
    def test_replay(self, method: str, space: str, n_envs: int) -> None:
        check_replay(replay_pair(SPACES[space], n_envs, compression_method=method), recorded(space, n_envs))

    def test_replay_that_saves_next_observations(self, method: str, space: str, n_envs: int) -> None:
        options = {"optimize_memory_usage": True, "handle_timeout_termination": False}
        if space == "Dict":
            check_dict_against_single_buffers(n_envs, compression_method=method, **options)
        else:
            check_replay(
                replay_pair(SPACES[space], n_envs, compression_method=method, **options), recorded(space, n_envs)
            )

    def test_rollout(self, method: str, space: str, n_envs: int) -> None:
        buffers = rollout_pair(SPACES[space], n_envs, compression_method=method)
        for first in (0, SLOTS):
            check_rollout(buffers, recorded(space, n_envs)[first : first + SLOTS])


@pytest.mark.parametrize("method", installed("none", "zstd"))
@pytest.mark.parametrize("space", [NUMBER, spaces.Dict({"number": NUMBER, "image": IMAGES})], ids=["number", "Dict"])
def test_rollouts_of_observations_without_axes(space: spaces.Space, method: str) -> None:
    check_rollout(rollout_pair(space, 2, compression_method=method), list(itertools.islice(play(space, 2), SLOTS)))


def check_dict_against_single_buffers(n_envs: int, **options: Any) -> None:
    """SB3's Dict buffer does not know ``optimize_memory_usage``, but a buffer for each key does."""
    arguments = {"device": "cpu", "n_envs": n_envs}
    space = SPACES["Dict"]
    actual = CompressedDictReplayBuffer(SLOTS * n_envs, space, spaces.Discrete(5), **arguments, **options)
    del options["compression_method"]
    expected = {
        key: ReplayBuffer(SLOTS * n_envs, part, spaces.Discrete(5), **arguments, **options)
        for key, part in space.spaces.items()
    }
    for step, transition in enumerate(recorded("Dict", n_envs), start=1):
        obs, next_obs, *rest = copied(transition)
        for key, buffer in expected.items():
            buffer.add(obs[key], next_obs[key], *rest)
        actual.add(obs, next_obs, *rest)
        if step not in LOOK_AFTER:
            continue
        np.random.seed(step)
        found = actual.sample(64)
        for key, buffer in expected.items():
            np.random.seed(step)
            part = found._replace(observations=found.observations[key], next_observations=found.next_observations[key])
            assert_same(tuple(part), tuple(buffer.sample(64)))


@pytest.mark.parametrize("method", installed("none", "rle", "zstd", "zstd-dict", "delta", "auto"))
@pytest.mark.parametrize("space", ["channels first", "channels last", "float64"])
def test_without_numba(space: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain code is the reference for the compiled one, and serves on its own."""
    monkeypatch.setattr(compiled, "has_numba", lambda: False)
    compiled.load_kernels.cache_clear()
    try:
        check_replay(replay_pair(SPACES[space], 3, compression_method=method), recorded(space, 3))
        check_rollout(rollout_pair(SPACES[space], 3, compression_method=method), recorded(space, 3)[:SLOTS])
    finally:
        compiled.load_kernels.cache_clear()


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_buffers_of_a_few_slots(method: str, slots: int) -> None:
    transitions = recorded("channels first", 3)[:50]
    check_replay(replay_pair(IMAGES, 3, slots=slots, compression_method=method), transitions, range(1, 50))
    buffers = rollout_pair(IMAGES, 3, slots=slots, compression_method=method)
    for first in range(0, 12, slots):
        check_rollout(buffers, transitions[first : first + slots])


@pytest.mark.parametrize(
    "action_space",
    [
        spaces.Box(-1, 1, (2,), np.float32),
        spaces.Box(-1, 1, (2, 2), np.float64),
        spaces.MultiBinary(3),
        spaces.MultiDiscrete([2, 3]),
    ],
    ids=str,
)
def test_every_action_space(action_space: spaces.Space) -> None:
    transitions = list(itertools.islice(play(IMAGES, 2, action_space=action_space), 60))
    check_replay(replay_pair(IMAGES, 2, action_space=action_space), transitions)
    check_rollout(rollout_pair(IMAGES, 2, action_space=action_space), transitions[:SLOTS])


@pytest.mark.parametrize("method", METHODS)
def test_large_batches_are_the_same_whichever_way_they_are_decoded(method: str) -> None:
    """Batches of megabytes, which are decoded on several cores, into memory that is used again."""
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffers = replay_pair(space, 2, slots=60, compression_method=method)
    for transition in itertools.islice(play(space, 2), 70):
        add_to_replay(buffers, transition)
    for seed in range(4):
        sample_both(*buffers, batch_size=200, seed=seed)


@pytest.mark.parametrize("method", installed("auto", "zstd", "delta"))
@pytest.mark.parametrize(
    ("space", "keys"),
    [(SPACES["float32"], None), (IMAGES, None), (SPACES["Dict"], ["float32", "channels last"])],
    ids=["vector", "image", "Dict"],
)
def test_vec_normalize(space: spaces.Space, keys: list[str] | None, method: str) -> None:
    transitions = list(itertools.islice(play(space, 2), 60))
    env = VecNormalize(DummyVecEnv([lambda: SpaceEnv(space)]), norm_obs_keys=keys)
    for transition in transitions[:10]:
        env._update_reward(np.zeros(1))
        for key in keys or [None]:
            statistics = env.obs_rms if key is None else env.obs_rms[key]
            statistics.update(transition.obs if key is None else transition.obs[key])
    buffers = replay_pair(space, 2, compression_method=method)
    for transition in transitions:
        add_to_replay(buffers, transition)
    for seed, env.norm_obs in enumerate((True, False)):
        sample_both(*buffers, batch_size=50, seed=seed, env=env)


SMALL = spaces.Box(0, 255, (3, 2, 3), np.uint8)
FRAMES = [np.full((2, 3), value, np.uint8) for value in range(3)]
observations = st.lists(st.integers(0, 2), min_size=3, max_size=3).map(
    lambda three: np.stack([FRAMES[i] for i in three])
)
steps = st.tuples(observations, observations, observations, observations)
operations = st.lists(
    st.one_of(
        *[st.lists(steps, min_size=1, max_size=12)] * 3,  # additions
        st.integers(1, 20),  # a sample of that size
        st.just("reset"),
    ),
    max_size=25,
)


@pytest.mark.parametrize("optimize_memory_usage", [False, True])
@pytest.mark.parametrize("options", [{"frame_stack": 3}, {"frame_stack": None}, {}], ids=str)
@pytest.mark.parametrize("method", installed("zstd", "delta"))
@settings(max_examples=10)
@given(operations=operations)
def test_any_sequence_of_replay_operations(
    method: str, options: dict[str, Any], optimize_memory_usage: bool, operations: list[Any]
) -> None:
    """Observations are put together from three frames, so that all kinds of accidental likeness come up."""
    if method == "delta":
        options = {**options, "compression_kwargs": {"frames_per_record": 3}}
    buffers = replay_pair(
        SMALL,
        2,
        slots=9,
        compression_method=method,
        optimize_memory_usage=optimize_memory_usage,
        handle_timeout_termination=not optimize_memory_usage,
        **options,
    )
    zeros = np.zeros(2, np.float32)
    for seed, operation in enumerate(operations):
        if operation == "reset":
            for buffer in buffers:
                buffer.reset()
        elif isinstance(operation, int):
            if buffers[0].size():
                sample_both(*buffers, batch_size=operation, seed=seed)
        else:
            for obs_0, obs_1, next_0, next_1 in operation:
                obs, next_obs = np.stack([obs_0, obs_1]), np.stack([next_0, next_1])
                add_to_replay(buffers, Transition(obs, next_obs, np.array([seed % 5, 1]), zeros, zeros, [{}, {}]))


@pytest.mark.parametrize("method", installed("zstd", "delta"))
@settings(max_examples=10)
@given(rollouts=st.lists(st.lists(steps, min_size=1, max_size=9), max_size=5))
def test_any_sequence_of_rollouts(method: str, rollouts: list[list[Any]]) -> None:
    """Some are cut short by a reset."""
    buffers = rollout_pair(SMALL, 2, slots=6, compression_method=method)
    zeros = np.zeros(2, np.float32)
    for seed, rollout in enumerate(rollouts):
        for buffer in buffers:
            buffer.reset()
        for obs_0, obs_1, _, _ in rollout[:6]:
            add_to_rollout(buffers, Transition(np.stack([obs_0, obs_1]), zeros, np.array([1, 2]), zeros, zeros, []))
        if buffers[0].full:
            epochs = []
            for buffer in buffers:
                np.random.seed(seed)
                epochs.append(tuple(buffer.get(5)))
            assert_same(epochs[1], epochs[0])
