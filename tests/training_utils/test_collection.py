"""``warm_up`` and ``eval_model`` store exactly what SB3's own collection stores for the same actions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize
from stable_baselines3.her import HerReplayBuffer

from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedHerReplayBuffer,
    CompressedNStepReplayBuffer,
    CompressedReplayBuffer,
)
from sb3_extra_buffers.distributed import ShardedReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.recording import DummyRecordBuffer, FramelessRecordBuffer, RecordBuffer
from sb3_extra_buffers.training_utils import atari
from sb3_extra_buffers.training_utils.buffer_warmup import warm_up
from sb3_extra_buffers.training_utils.eval_model import eval_model
from tests.environments import SpaceEnv
from tests.training_utils.scripts import Scripted, assert_same_contents, collected_by_sb3

IMAGES = spaces.Box(0, 255, (2, 6, 5), np.uint8)
VECTORS = spaces.Box(-10, 10, (3,), np.float32)
MIXED = spaces.Dict({"numbers": spaces.Box(0, 9, (4, 5), np.int32), "vector": VECTORS})


def made(space: spaces.Space, n_envs: int = 2, action_space: spaces.Space | None = None) -> VecEnv:
    """Environments whose episodes end after 13 steps, except those of the second, which are cut off after 9."""
    lengths = itertools.cycle([20, 9, 20])
    return make_vec_env(lambda: SpaceEnv(space, action_space, next(lengths)), n_envs=n_envs, seed=0)


def buffer_for(env: VecEnv, steps: int, buffer_class: Any = CompressedReplayBuffer, **kwargs: Any) -> Any:
    kwargs = {"n_envs": env.num_envs, "device": "cpu"} | kwargs
    return buffer_class(steps * kwargs["n_envs"], env.observation_space, env.action_space, **kwargs)


def quietly_warm_up(buffer: Any, env: VecEnv, **kwargs: Any) -> Any:
    return warm_up(buffer, env.num_envs, env, Scripted(env), progress=False, **kwargs)


@pytest.mark.parametrize("buffer_class", [CompressedReplayBuffer, ReplayBuffer])
@pytest.mark.parametrize("space", [IMAGES, VECTORS], ids=["images", "vectors"])
def test_a_warm_buffer_has_what_sb3_would_have_stored(space: spaces.Space, buffer_class: Any) -> None:
    expected = collected_by_sb3(made(space), steps=60)
    assert expected.timeouts.any()  # episodes of both kinds
    assert (expected.dones > expected.timeouts).any()
    env = made(space)
    buffer = buffer_for(env, 60, buffer_class)
    quietly_warm_up(buffer, env)
    assert_same_contents(buffer, expected)


def test_dict_observations() -> None:
    expected = collected_by_sb3(made(MIXED), steps=30)
    env = made(MIXED)
    buffers = [buffer_for(env, 30, CompressedDictReplayBuffer), buffer_for(env, 30, DictReplayBuffer)]
    quietly_warm_up(buffers, env)
    for buffer in buffers:
        assert_same_contents(buffer, expected)


def test_continuous_actions_are_stored_scaled() -> None:
    action_space = spaces.Box(np.array([-3, 0], np.float32), np.array([5, 10], np.float32))
    expected = collected_by_sb3(made(VECTORS, action_space=action_space), 30, SAC)
    env = made(VECTORS, action_space=action_space)
    buffer = buffer_for(env, 30)
    quietly_warm_up(buffer, env)
    # SB3 scales actions back before a step, so that rewards here, which are sums of actions, differ in the last digit.
    assert_same_contents(buffer, expected, exact=False)
    np.testing.assert_array_equal(buffer.actions, expected.actions)


@pytest.mark.parametrize("space", [VECTORS, MIXED], ids=["vectors", "dict"])
def test_normalized_environments_are_stored_as_they_are(space: spaces.Space) -> None:
    def normalized() -> VecEnv:
        return VecNormalize(made(space), norm_obs_keys=["vector"] if space is MIXED else None)

    expected = collected_by_sb3(normalized(), steps=60)
    env = normalized()
    buffer = buffer_for(env, 60, CompressedDictReplayBuffer if space is MIXED else CompressedReplayBuffer)
    returns, _ = quietly_warm_up(buffer, env)
    assert_same_contents(buffer, expected)
    assert min(returns) > 10  # not normalized


def breakout(n_envs: int = 2, framestack: int = 4, **kwargs: Any) -> VecEnv:
    pytest.importorskip("ale_py")
    return atari.make_env(
        "BreakoutNoFrameskip-v4", n_envs, vec_env_cls=DummyVecEnv, framestack=framestack, seed=3, **kwargs
    )


@pytest.mark.parametrize("framestack", [1, 4])
def test_a_real_game(framestack: int) -> None:
    limits = {"env_kwargs": {"max_num_frames_per_episode": 250}}  # some games are cut off, some lives are lost
    expected = collected_by_sb3(breakout(framestack=framestack, **limits), steps=150)
    assert expected.timeouts.any()
    assert (expected.dones > expected.timeouts).any()
    env = breakout(framestack=framestack, **limits)
    buffer = buffer_for(env, 150)
    evaluation = quietly_warm_up(buffer, env)
    assert_same_contents(buffer, expected)
    assert len(evaluation.returns) < expected.dones.sum()


def test_a_lost_life_does_not_end_an_episode() -> None:
    env = breakout(n_envs=1)
    buffer = buffer_for(env, 1_000)
    returns, seconds = eval_model(1, env, Scripted(env), buffer=buffer, progress=False)
    assert len(returns) == len(seconds) == 1
    assert buffer.dones.sum() == 5
    assert buffer.size() < 1_000
    assert buffer.rewards.sum() == returns[0]  # of this game, as SB3 clips rewards to their signs
    assert 0 < seconds[0] < 10


def test_a_buffer_for_fewer_environments_gets_the_first_of_them() -> None:
    one, all_three = made(IMAGES, 1), made(IMAGES, 3)
    script = Scripted(all_three)
    buffers = [buffer_for(all_three, 40), buffer_for(all_three, 40, ReplayBuffer, n_envs=1)]
    warm_up(buffers, 3, all_three, script, progress=False)
    for name in ("observations", "next_observations", "actions", "dones", "timeouts", "rewards"):
        np.testing.assert_array_equal(getattr(buffers[1], name), np.asarray(getattr(buffers[0], name))[:, :1])
    with pytest.raises(ConfigurationError, match="for 3 environments, but there are only 1"):
        eval_model(1, one, script, buffer=buffers[0])


def test_rollout_buffers_are_refused() -> None:
    env = made(VECTORS)
    buffer = RolloutBuffer(4, env.observation_space, env.action_space, device="cpu", n_envs=2)
    with pytest.raises(ConfigurationError, match="A RolloutBuffer cannot be filled: pass a replay buffer or a record"):
        eval_model(1, env, Scripted(env), buffer=buffer)  # type: ignore[arg-type]


@pytest.mark.parametrize("make_buffer", [lambda: RecordBuffer((6, 5), 2, 60), lambda: FramelessRecordBuffer(size=60)])
def test_record_buffers_record_the_first_environment(make_buffer: Callable[[], RecordBuffer]) -> None:
    env = made(IMAGES)
    replay, record = buffer_for(env, 60), make_buffer()
    quietly_warm_up([replay, record, DummyRecordBuffer()], env, warmup_episodes=5)
    n = replay.pos
    assert len(record) == n
    np.testing.assert_array_equal(record.rewards[:n], replay.rewards[:n, 0])
    np.testing.assert_array_equal(record.actions[:n], replay.actions[:n, 0, 0])
    if type(record) is RecordBuffer:
        np.testing.assert_array_equal(record.frames[:n], replay.observations[:n, 0])


def test_record_buffers_record_what_is_rendered_if_observations_do_not_fit() -> None:
    record = RecordBuffer((210, 160), 3, 20)
    env = breakout(n_envs=1)
    warm_up(record, 1, env, Scripted(env), progress=False)
    assert len(record) == 20
    assert len(np.unique(record[-1].frame)) > 3  # colours


def test_warming_up_ends_when_it_should() -> None:
    def episodes(steps: int, **kwargs: Any) -> tuple[int, bool]:
        env = made(VECTORS)
        buffer = buffer_for(env, steps)
        return len(quietly_warm_up(buffer, env, **kwargs).returns), buffer.full

    assert episodes(20) == (3, True)
    assert episodes(1_000, warmup_episodes=6) == (6, False)
    assert episodes(20, warmup_episodes=6) == (3, True)
    assert episodes(1_000, mean_ep_len=500) == (4, False)


def test_a_mean_episode_length_fills_a_buffer_for_fewer_environments() -> None:
    env = made(VECTORS, n_envs=4)
    buffer = buffer_for(env, 40, n_envs=1)
    warm_up(buffer, 1, env, Scripted(env), mean_ep_len=9, progress=False)
    assert buffer.full


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"n_envs": 3}, "from 1 to 2"),
        ({"n_envs": 0}, "from 1 to 2"),
        ({"warmup_episodes": 0}, "must be positive"),
        ({"mean_ep_len": -1}, "must be positive"),
        ({"buffer": []}, "no buffer to fill"),
        ({"buffer": DummyRecordBuffer()}, "no buffer to fill"),
        ({"buffer": [object()]}, "cannot be filled"),
    ],
)
def test_mistakes_in_warming_up(kwargs: dict[str, Any], message: str) -> None:
    env = made(VECTORS)
    arguments = {"buffer": buffer_for(env, 5), "n_envs": 2, "warmup_env": env, "warmup_model": Scripted(env)} | kwargs
    with pytest.raises(ConfigurationError, match=message):
        warm_up(**arguments)


def test_a_warm_buffer_trains_dqn() -> None:
    env = made(IMAGES)
    model = DQN(
        "MlpPolicy",
        env,
        buffer_size=200,
        learning_starts=0,
        replay_buffer_class=CompressedReplayBuffer,
        policy_kwargs={"net_arch": [8]},
        device="cpu",
    )
    before = model.policy.state_dict()["q_net.q_net.0.weight"].clone()
    warm_up(model.replay_buffer, 2, env, model, warmup_episodes=8, progress=False)
    filled = model.replay_buffer.size()
    assert filled > 30
    model.learn(40)
    assert model.replay_buffer.size() == filled + 20
    assert not before.equal(model.policy.state_dict()["q_net.q_net.0.weight"])


def add_a_huge_reward(buffer: Any) -> None:
    step = (np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32), np.zeros((2, 1)), np.full(2, 1e6))
    buffer.add(*step, np.array([False, False]), [{}, {}])


@pytest.mark.parametrize("buffer_class", [NStepReplayBuffer, CompressedNStepReplayBuffer])
def test_n_step_returns_stop_where_warming_up_stopped(buffer_class: Any) -> None:
    env = made(VECTORS)
    buffer = buffer_for(env, 100, buffer_class, n_steps=3, gamma=1.0)
    quietly_warm_up(buffer, env, mean_ep_len=1_000)
    stopped = buffer.pos - 1
    assert buffer.dones[stopped].tolist() == [0, 1]
    add_a_huge_reward(buffer)
    rewards = buffer._get_samples(np.full(50, stopped)).rewards
    assert np.isin(rewards, buffer.rewards[stopped]).all()


@pytest.mark.parametrize("placement", ["learner", "shards"])
def test_n_step_returns_of_all_parts_stop_where_warming_up_stopped(placement: str) -> None:
    env = made(VECTORS)
    n_step = functools.partial(ShardedReplayBuffer, buffer_class=CompressedNStepReplayBuffer, n_steps=3, gamma=1.0)
    buffer = buffer_for(env, 100, n_step, placement=placement, shards=1, in_process=True)
    quietly_warm_up(buffer, env, mean_ep_len=1_000)
    add_a_huge_reward(buffer)
    rewards = buffer.sample(400).rewards
    assert ((rewards < 1e5) | (rewards == 1e6)).all()
    assert (rewards == 1e6).any()


@pytest.mark.parametrize("buffer_class", [HerReplayBuffer, CompressedHerReplayBuffer])
def test_her_does_not_join_episodes_across_warming_up(buffer_class: Any) -> None:
    env = DummyVecEnv([lambda: BitFlippingEnv(n_bits=4, max_steps=15)])
    buffer = buffer_class(40, env.observation_space, env.action_space, env, device="cpu")
    quietly_warm_up(buffer, env)
    assert (buffer._current_ep_start == buffer.pos).all()
    assert buffer.sample(8).observations["observation"].shape == (8, 4)
