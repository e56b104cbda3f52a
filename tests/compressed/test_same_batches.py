"""Whatever SB3's buffer returns under a seed, a compressed one returns too: values, shapes, dtypes and devices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.buffers import DictReplayBuffer, DictRolloutBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_extra_buffers import compiled
from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedDictRolloutBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
)
from tests.environments import SpaceEnv
from tests.methods import METHODS, installed
from tests.transitions import (
    Stacked,
    Transition,
    add_to_replay,
    add_to_rollout,
    assert_same,
    copied,
    draw,
    play,
    sample_both,
)

SPACES: dict[str, spaces.Space] = {
    "channels first": spaces.Box(0, 255, (4, 8, 9), np.uint8),
    "channels last": spaces.Box(0, 255, (8, 9, 3), np.uint8),
    "float32": spaces.Box(-np.inf, np.inf, (5,), np.float32),
    "float64": spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
    "int32": spaces.Box(-(2**31), 2**31 - 1, (7,), np.int32),
    "int64": spaces.Box(-(2**62), 2**62, (3,), np.int64),
    "Discrete": spaces.Discrete(600),
    "MultiDiscrete": spaces.MultiDiscrete([3, 500, 2]),
    "MultiBinary": spaces.MultiBinary(11),
}
SPACES["Dict"] = spaces.Dict({key: SPACES[key] for key in ("channels last", "float32", "Discrete", "MultiBinary")})
SLOTS = 20
"""After as many steps a buffer decides how to store them, so that samples come from before and after."""
LOOK_AFTER = (1, 10, 19, 20, 21, 70)
IMAGES = SPACES["channels first"]


@functools.cache
def recorded(space: str, n_envs: int) -> list[Transition]:
    return list(itertools.islice(play(SPACES[space], n_envs), LOOK_AFTER[-1]))


def replay_pair(space: spaces.Space, n_envs: int = 1, slots: int = SLOTS, **kwargs: Any) -> list[ReplayBuffer]:
    """SB3's buffer and ours. Arguments that SB3 does not know go to ours only."""
    known = {key: kwargs.pop(key) for key in ("optimize_memory_usage", "handle_timeout_termination") if key in kwargs}
    arguments = {"device": "cpu", "n_envs": n_envs, **known}
    action_space = kwargs.pop("action_space", spaces.Discrete(5))
    plain, compressed = ReplayBuffer, CompressedReplayBuffer
    if isinstance(space, spaces.Dict):
        plain, compressed = DictReplayBuffer, CompressedDictReplayBuffer
    return [
        plain(slots * n_envs, space, action_space, **arguments),
        compressed(slots * n_envs, space, action_space, **arguments, **kwargs),
    ]


def rollout_pair(space: spaces.Space, n_envs: int = 1, slots: int = SLOTS, **kwargs: Any) -> list[RolloutBuffer]:
    arguments = {"device": "cpu", "n_envs": n_envs, "gamma": 0.9, "gae_lambda": 0.8}
    action_space = kwargs.pop("action_space", spaces.Discrete(5))
    plain, compressed = RolloutBuffer, CompressedRolloutBuffer
    if isinstance(space, spaces.Dict):
        plain, compressed = DictRolloutBuffer, CompressedDictRolloutBuffer
    return [
        plain(slots, space, action_space, **arguments),
        compressed(slots, space, action_space, **arguments, **kwargs),
    ]


def check_replay(buffers: list[ReplayBuffer], transitions: Iterable[Transition], look_after: Any = LOOK_AFTER) -> None:
    for step, transition in enumerate(transitions, start=1):
        add_to_replay(buffers, transition)
        if step in look_after:
            sample_both(*buffers, batch_size=64, seed=step)
            sample_both(*buffers, batch_size=1, seed=step)
    assert buffers[0].size() == buffers[1].size()


def check_rollout(buffers: list[RolloutBuffer], transitions: list[Transition]) -> None:
    """A rollout, looked at in several epochs."""
    last = transitions[-1]
    for buffer in buffers:
        buffer.reset()
    for transition in transitions:
        add_to_rollout(buffers, transition)
    for buffer in buffers:
        buffer.compute_returns_and_advantage(th.tensor(last.reward), last.done)
    for epoch, batch_size in enumerate((16, 7, None)):
        epochs = []
        for buffer in buffers:
            np.random.seed(epoch)
            epochs.append(tuple(buffer.get(batch_size)))
        assert_same(epochs[1], epochs[0])
    assert_same(buffers[1].values.flatten(), buffers[0].values.flatten())
    assert_same(buffers[1].returns.flatten(), buffers[0].returns.flatten())


# How many environments there are does not concern a codec, so that one of each kind is enough for a single one.
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


class TestFrameStacks:
    @pytest.mark.parametrize("fill", ["zero", "repeat"])
    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize("axis", [0, -1])
    @pytest.mark.parametrize("depth", [2, 3, 4, 16])
    def test_of_every_kind(self, depth: int, axis: int, channels: int, fill: str) -> None:
        shape = [6, 7]
        shape.insert(len(shape) if axis else 0, depth * channels)
        check_stacks(spaces.Box(0, 255, tuple(shape), np.uint8), depth=depth, axis=axis, fill=fill)

    @pytest.mark.parametrize("dtype", [np.float32, np.int16, np.float64])
    @pytest.mark.parametrize("axis", [0, -1])
    def test_of_other_dtypes(self, dtype: Any, axis: int) -> None:
        shape = (3, 5, 6) if axis == 0 else (5, 6, 3)
        check_stacks(spaces.Box(-100, 100, shape, dtype), depth=3, axis=axis)

    def test_of_vectors(self) -> None:
        check_stacks(spaces.Box(-np.inf, np.inf, (12,), np.float32), depth=4, axis=0)

    @pytest.mark.parametrize("frame_stack", [None, 1, 2, 4, 8])
    @pytest.mark.parametrize("shape", [(8, 6, 7), (6, 7, 8)], ids=["first", "last"])
    @pytest.mark.parametrize("method", ["rle", "delta"])
    def test_declared_rightly_or_wrongly(self, method: str, shape: tuple[int, ...], frame_stack: int | None) -> None:
        axis = 0 if shape[0] == 8 else -1
        space = spaces.Box(0, 255, shape, np.uint8)
        check_stacks(space, depth=4, axis=axis, compression_method=method, frame_stack=frame_stack)


def check_stacks(space: spaces.Box, depth: int, axis: int, fill: str = "zero", **options: Any) -> None:
    def observer(space: spaces.Box, rng: np.random.Generator) -> Stacked:
        return Stacked(space, rng, depth, axis, fill)

    transitions = list(itertools.islice(play(space, 2, make_observer=observer), LOOK_AFTER[-1]))
    check_replay(replay_pair(space, 2, **options), transitions)


class Constant:
    """Nothing ever changes."""

    def __init__(self, space: spaces.Box, rng: np.random.Generator) -> None:
        self.frame = np.full(space.shape, 7, space.dtype)

    def reset(self) -> np.ndarray:
        return self.frame

    step = reset


class ThenMoving(Constant):
    """Nothing changes until long after the buffer has decided how to store it."""

    def __init__(self, space: spaces.Box, rng: np.random.Generator) -> None:
        super().__init__(space, rng)
        self.moving, self.steps = Stacked(space, rng), 0

    def step(self) -> np.ndarray:
        self.steps += 1
        return self.frame if self.steps < 30 else self.moving.step()


class OneFrameRepeated:
    """A stack of one and the same frame, another one in each step."""

    def __init__(self, space: spaces.Box, rng: np.random.Generator) -> None:
        self.space, self.rng = space, rng

    def reset(self) -> np.ndarray:
        frame = draw(spaces.Box(0, 255, self.space.shape[1:], np.uint8), self.rng)
        return np.stack([frame] * self.space.shape[0])

    step = reset


class BackAndForth:
    """Two frames in turns, so that a stack equals the one two steps ago."""

    def __init__(self, space: spaces.Box, rng: np.random.Generator) -> None:
        self.frames = [draw(space, rng)[0] for _ in range(2)]
        self.depth, self.steps = space.shape[0], 0

    def reset(self) -> np.ndarray:
        self.steps += 1
        return np.stack([self.frames[(self.steps + i) % 2] for i in range(self.depth)])

    step = reset


class NewestFirst(Stacked):
    """A stack in the wrong order: the newest frame comes first."""

    def _observe(self) -> np.ndarray:
        return super()._observe()[::-1].copy()


MISLEADING: dict[str, Callable[..., Any]] = {
    "constant": Constant,
    "constant, then moving": ThenMoving,
    "one frame repeated": OneFrameRepeated,
    "two frames in turns": BackAndForth,
    "newest frame first": NewestFirst,
    "shifted by two": functools.partial(Stacked, shift=2),
    "shifted by a whole stack": functools.partial(Stacked, shift=4),
}


@functools.cache
def misleading(content: str) -> list[Transition]:
    return list(itertools.islice(play(IMAGES, 2, make_observer=MISLEADING[content]), LOOK_AFTER[-1]))


@pytest.mark.parametrize("frame_stack", ["auto", None, 4])
@pytest.mark.parametrize("method", ["rle", "delta", "auto"])
class TestMisleadingContent:
    @pytest.mark.parametrize("content", MISLEADING)
    def test_of_frames(self, content: str, method: str, frame_stack: Any) -> None:
        self.check(misleading(content), method, frame_stack)

    def test_of_an_environment_that_is_reset_in_every_step(self, method: str, frame_stack: Any) -> None:
        self.check(play(IMAGES, 2, episode_end=3), method, frame_stack)

    def test_of_environments_that_are_all_the_same(self, method: str, frame_stack: Any) -> None:
        transitions = (
            Transition(*(np.repeat(part, 2, axis=0) for part in transition[:-1]), transition.infos * 2)
            for transition in recorded("channels first", 1)
        )
        self.check(transitions, method, frame_stack)

    @staticmethod
    def check(transitions: Iterable[Transition], method: str, frame_stack: Any) -> None:
        buffers = replay_pair(IMAGES, 2, compression_method=method, frame_stack=frame_stack)
        check_replay(buffers, itertools.islice(transitions, LOOK_AFTER[-1]))


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
