"""Hindsight experience replay: SB3's batches, with every option, goal and strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import DQN, HerReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_extra_buffers.compressed.her_buffer import CompressedHerReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError
from tests.environments import SpaceEnv
from tests.family.helpers import METHODS, SLOTS, STACK, VECTOR, assert_same_training, small_net, transitions
from tests.transitions import add_to_replay, assert_same, sample_both

GOALS = {
    "vector goals": spaces.Dict({"observation": VECTOR, "achieved_goal": VECTOR, "desired_goal": VECTOR}),
    "image goals": spaces.Dict({"observation": VECTOR, "achieved_goal": STACK, "desired_goal": STACK}),
}
LOOK_AFTER = (30, SLOTS, SLOTS + 1, 3 * SLOTS + 7)


class GoalEnv(SpaceEnv):
    """Rewards goals that have something in common, more so where the info says so."""

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, infos: Any) -> np.ndarray:
        difference = (achieved.astype(float) - desired).mean(axis=tuple(range(1, achieved.ndim)))
        return difference + np.array([info.get("bonus", 0.0) for info in infos])


def goal_env(space: spaces.Space, n_envs: int = 1) -> DummyVecEnv:
    return DummyVecEnv([lambda: GoalEnv(space)] * n_envs)


def pair(
    space: spaces.Space, n_envs: int, method: str = "delta", slots: int = SLOTS, **kwargs: Any
) -> list[HerReplayBuffer]:
    arguments = {"env": goal_env(space, n_envs), "device": "cpu", "n_envs": n_envs, **kwargs}
    return [
        HerReplayBuffer(slots * n_envs, space, spaces.Discrete(5), **arguments),
        CompressedHerReplayBuffer(slots * n_envs, space, spaces.Discrete(5), **arguments, compression_method=method),
    ]


def play_and_compare(buffers: list[HerReplayBuffer], space: spaces.Space, n_envs: int, env: Any = None) -> None:
    for count, transition in enumerate(transitions(space, LOOK_AFTER[-1], n_envs), 1):
        infos = [{**info, "bonus": float(count)} for info in transition.infos]
        add_to_replay(buffers, transition._replace(infos=infos))
        if count in LOOK_AFTER:
            sample_both(*buffers, batch_size=60, seed=count, env=env)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("goals", GOALS)
def test_same_batches(method: str, goals: str) -> None:
    play_and_compare(pair(GOALS[goals], 2, method), GOALS[goals], 2)


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("n_sampled_goal", [0, 1, 7])
def test_options(strategy: str, n_sampled_goal: int) -> None:
    space = GOALS["vector goals"]
    options = {"goal_selection_strategy": strategy, "n_sampled_goal": n_sampled_goal, "copy_info_dict": True}
    play_and_compare(pair(space, 2, **options, handle_timeout_termination=strategy != "final"), space, 2)


@pytest.mark.parametrize(
    "options", [{"normalize_images": True}, {"output_dtype": "float"}, {"dtypes": "float64"}], ids=str
)
def test_rewards_do_not_depend_on_what_batches_look_like(options: dict[str, Any]) -> None:
    """The environment computes them from goals as it returned them, not from those of the batch."""
    space = GOALS["image goals"]
    env = goal_env(space, 2)
    expected, actual = (
        cls(SLOTS * 2, space, spaces.Discrete(5), env=env, device="cpu", n_envs=2, **kwargs)
        for cls, kwargs in ((HerReplayBuffer, {}), (CompressedHerReplayBuffer, options))
    )
    for transition in transitions(space, SLOTS + 7, 2):
        add_to_replay([expected, actual], transition)
    batches = []
    for buffer in (expected, actual):
        np.random.seed(0)
        batches.append(buffer.sample(60))
    assert_same(batches[1].rewards, batches[0].rewards)
    for ours, theirs in zip(batches[1][::2][:2], batches[0][::2][:2], strict=True):
        for key, values in theirs.items():
            if options == {"dtypes": "float64"}:
                assert_same(ours[key], values)
            else:
                divisor = 255 if "normalize_images" in options and key != "observation" else 1
                assert_same(ours[key], values.float() / divisor)


def test_normalized() -> None:
    space = GOALS["vector goals"]
    env = VecNormalize(goal_env(space, 2), norm_obs_keys=["observation"])
    env.reset()
    env.step(np.zeros(2, dtype=int))
    play_and_compare(pair(space, 2), space, 2, env)


def test_no_dicts_where_infos_are_not_kept() -> None:
    space = GOALS["vector goals"]
    assert pair(space, 1)[1].infos.size == 0
    assert pair(space, 1, copy_info_dict=True)[1].infos.shape == (SLOTS, 1)


def test_no_finished_episode() -> None:
    space = GOALS["vector goals"]
    buffer = pair(space, 1)[1]
    with pytest.raises(RuntimeError, match="Unable to sample before the end of the first episode"):
        buffer.sample(4)
    for transition in transitions(space, 20, episode_end=0.0):
        add_to_replay([buffer], transition)
    with pytest.raises(RuntimeError, match="Unable to sample before the end of the first episode"):
        buffer.sample(4)


def test_episode_longer_than_the_buffer() -> None:
    space = GOALS["vector goals"]
    expected, actual = buffers = pair(space, 1, slots=15)
    n_compared = 0
    for count, transition in enumerate(transitions(space, 130, episode_end=0.0), 1):
        add_to_replay(buffers, transition._replace(done=np.array([count % 40 == 0])))
        assert_same(actual.ep_length, expected.ep_length)
        if expected.ep_length.any():
            n_compared += 1
            sample_both(*buffers, batch_size=20, seed=count)
    assert n_compared > 10


@pytest.mark.parametrize("is_packed", [True, False])
def test_truncate_last_trajectory(is_packed: bool) -> None:
    space = GOALS["vector goals"]
    buffers = pair(space, 2)
    for transition in transitions(space, 25, 2, episode_end=0.0):
        add_to_replay(buffers, transition)
    if not is_packed:
        buffers[1].dones[3] = buffers[0].dones[3] = 0.5
    for buffer in buffers:
        with pytest.warns(UserWarning, match="will be truncated"):
            buffer.truncate_last_trajectory()
    assert (buffers[1]._flags is not None) is is_packed
    sample_both(*buffers, batch_size=30, seed=0)
    assert_same(buffers[1].dones, buffers[0].dones)
    assert_same(buffers[1].timeouts, buffers[0].timeouts)


def test_sampling_leaves_dones_and_actions_in_a_byte_each() -> None:
    space = GOALS["vector goals"]
    buffer = pair(space, 2)[1]
    for transition in transitions(space, 30, 2):
        add_to_replay([buffer], transition)
    buffer.sample(20)
    assert buffer._flags is not None
    assert buffer._action_bytes is not None


def test_no_environment() -> None:
    space = GOALS["vector goals"]
    buffer = CompressedHerReplayBuffer(SLOTS, space, spaces.Discrete(5), env=None, device="cpu")
    for transition in transitions(space, 30):
        add_to_replay([buffer], transition)
    with pytest.raises(ConfigurationError, match="set_env"):
        buffer.sample(20)


def test_a_reset_buffer_is_like_a_new_one(tmp_path: Path) -> None:
    space = GOALS["vector goals"]
    new, used = pair(space, 2)
    for transition in transitions(space, SLOTS + 18, 2, seed=1):
        add_to_replay([used], transition)
    used.reset()
    with pytest.raises(RuntimeError, match="Unable to sample before the end of the first episode"):
        used.sample(4)
    for transition in transitions(space, 40, 2):
        add_to_replay([new, used], transition)
    sample_both(new, used, batch_size=60, seed=0)
    used.save(tmp_path / "buffer")
    loaded = CompressedHerReplayBuffer.load(tmp_path / "buffer", "cpu")
    loaded.set_env(used.env)
    sample_both(new, loaded, batch_size=60, seed=0)


def test_set_env() -> None:
    buffer = pair(GOALS["vector goals"], 1)[1]
    with pytest.raises(ValueError, match="already initialized"):
        buffer.set_env(buffer.env)


def test_optimize_memory_usage_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="last observation"):
        CompressedHerReplayBuffer(10, GOALS["vector goals"], spaces.Discrete(5), env=None, optimize_memory_usage=True)


def test_unknown_argument() -> None:
    with pytest.raises(TypeError, match="goal_strategy"):
        CompressedHerReplayBuffer(10, GOALS["vector goals"], spaces.Discrete(5), env=None, goal_strategy="future")


@pytest.mark.parametrize("image_obs", [False, True])
def test_same_training(image_obs: bool) -> None:
    def make(cls: type[HerReplayBuffer], **kwargs: Any) -> DQN:
        env = DummyVecEnv([lambda: BitFlippingEnv(n_bits=4, continuous=False, image_obs_space=image_obs)])
        env.action_space.seed(0)
        return DQN(
            "MultiInputPolicy",
            env,
            learning_starts=30,
            buffer_size=50,
            batch_size=8,
            policy_kwargs=small_net(),
            replay_buffer_class=cls,
            replay_buffer_kwargs={"n_sampled_goal": 4, "copy_info_dict": True, **kwargs},
            seed=0,
        )

    assert_same_training(
        lambda: make(HerReplayBuffer), lambda: make(CompressedHerReplayBuffer, compression_method="delta"), steps=80
    )
