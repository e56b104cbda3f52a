"""A learner and its collectors, in one process: everything but Ray."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
from sb3_contrib import ARS, QRDQN, TQC
from stable_baselines3 import DQN, PPO, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_extra_buffers.compressed import CompressedNStepReplayBuffer, CompressedReplayBuffer, PrioritizedDQN
from sb3_extra_buffers.compressed.prioritized_buffer import (
    CompressedPrioritizedReplayBuffer,
)
from sb3_extra_buffers.distributed import ShardedReplayBuffer, distributed
from sb3_extra_buffers.distributed import learner as learner_module
from sb3_extra_buffers.distributed.transport import LocalTransport, Reply
from sb3_extra_buffers.errors import ArgumentError, ConfigurationError, EmptyBufferError
from tests.distributed.test_on_policy import Game, Keep

NETWORK = {"net_arch": [8]}


def make(algorithm: Any = DQN, env: Any = "CartPole-v1", **arguments: Any) -> Any:
    collectors = {"n": 2, "envs": 2, "segment_steps": 8, "in_process": True, **arguments.pop("collectors", {})}
    given = {"learning_starts": 50, "buffer_size": 2000, "batch_size": 8, "seed": 0, "policy_kwargs": dict(NETWORK)}
    policy = arguments.pop("policy", "MlpPolicy")
    return distributed(algorithm)(policy, env, device="cpu", collectors=collectors, **given | arguments)


@pytest.mark.parametrize(
    ("algorithm", "env"),
    [(DQN, "CartPole-v1"), (QRDQN, "CartPole-v1"), (SAC, "Pendulum-v1"), (TD3, "Pendulum-v1"), (TQC, "Pendulum-v1")],
)
def test_every_algorithm_learns_from_collectors(algorithm: Any, env: str) -> None:
    model = make(algorithm, env, train_freq=4)
    model.learn(200)
    assert model.num_timesteps == 200
    assert model._n_updates == pytest.approx((200 - 50) / 4 / 2, abs=2)
    assert [part.size() > 0 for part in model.replay_buffer.parts] == [True, True]
    model.replay_buffer.check()


def test_the_buffer_holds_what_the_environments_did() -> None:
    """CartPole's observation follows from the one before, so every transition can be checked."""
    model = make()
    model.learn(400)
    physics: Any = gym.make("CartPole-v1").unwrapped
    for part in model.replay_buffer.parts:
        for slot in range(part.size()):
            for env in range(2):
                physics.reset()
                physics.state = part.observations[slot, env]
                found, *_ = physics.step(int(part.actions[slot, env, 0]))
                np.testing.assert_allclose(found, part.next_observations[slot, env], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "buffer_class", "options"),
    [
        (DQN, CompressedNStepReplayBuffer, {"n_steps": 3, "gamma": 0.99}),
        (PrioritizedDQN, CompressedPrioritizedReplayBuffer, {"alpha": 0.5}),
    ],
)
def test_other_buffer_classes(algorithm: Any, buffer_class: Any, options: dict[str, Any]) -> None:
    model = make(
        algorithm,
        replay_buffer_class=ShardedReplayBuffer,
        replay_buffer_kwargs={"buffer_class": buffer_class, **options},
    )
    model.learn(150)
    assert all(isinstance(part, buffer_class) for part in model.replay_buffer.parts)
    assert model._n_updates > 0


@pytest.mark.parametrize("is_dict", [False, True])
def test_the_n_steps_of_the_algorithm_are_those_of_the_default_buffer(is_dict: bool, tmp_path: Any) -> None:
    game = partial(Game, is_dict)
    policy = "MultiInputPolicy" if is_dict else "MlpPolicy"
    model = make(env=game(), policy=policy, n_steps=3, gamma=0.5, collectors={"make_env": game})
    model.learn(200)
    discounts = model.replay_buffer.sample(200).discounts.numpy()
    assert set(np.unique(discounts)) == {0.5, 0.25, 0.125}
    model.save(tmp_path / "model")
    type(model).load(tmp_path / "model", env=game())  # without a warning that n_steps is ignored
    with pytest.warns(UserWarning, match="`n_steps=3` is ignored"):
        make(n_steps=3, replay_buffer_class=ShardedReplayBuffer)


@pytest.mark.parametrize("handles", [False, True])
def test_time_limits_are_handled_as_the_buffer_of_the_learner_does(handles: bool) -> None:
    model = make(
        env=Game(),
        collectors={"make_env": Game},
        replay_buffer_class=ShardedReplayBuffer,
        replay_buffer_kwargs={"handle_timeout_termination": handles},
    )
    model.learn(200)
    for part in model.replay_buffer.parts:
        dones, timeouts = part.dones[: part.size()], part.timeouts[: part.size()]
        assert dones.any()
        assert bool(timeouts.any()) == handles


class KillAllShards(BaseCallback):
    """Takes everything away from the learner, once."""

    def _on_step(self) -> bool:
        if self.num_timesteps == 100:
            for shard in range(2):
                self.model.replay_buffer._shards._transport.kill(shard)  # type: ignore[attr-defined]
        return True


def test_training_goes_on_when_all_shards_have_died(caplog: pytest.LogCaptureFixture) -> None:
    in_shards = {"placement": "shards", "shards": 2, "in_process": True}
    model = make(replay_buffer_class=ShardedReplayBuffer, replay_buffer_kwargs=in_shards)
    model.learn(400, callback=KillAllShards())
    assert "All transitions were lost with their shards" in caplog.text
    assert model.replay_buffer.shard_statistics["transitions_lost"] >= 80
    assert model._n_updates > 20
    model.replay_buffer.check()


def test_an_empty_buffer_is_an_error_if_nothing_was_lost() -> None:
    model = make(replay_buffer_class=ShardedReplayBuffer)
    model.set_logger(Logger(None, []))
    with pytest.raises(EmptyBufferError):
        model.train(1)


class Watch(BaseCallback):
    """What a user's callback sees."""

    def __init__(self) -> None:
        super().__init__()
        self.rewards = 0.0
        self.episodes: list[float] = []
        self.began = self.ended = 0

    def _on_training_start(self) -> None:
        self.began += 1

    def _on_training_end(self) -> None:
        self.ended += 1

    def _on_step(self) -> bool:
        self.rewards += float(self.locals["rewards"].sum())
        self.episodes += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return True


def test_callbacks_and_the_logger_see_every_step(tmp_path: Any) -> None:
    watch = Watch()
    evaluate = EvalCallback(Monitor(gym.make("CartPole-v1")), eval_freq=50, n_eval_episodes=1, verbose=0)
    model = make()
    model.learn(400, callback=[watch, evaluate], log_interval=1)
    assert (watch.began, watch.ended, watch.n_calls) == (1, 1, 200)
    assert watch.rewards == 400  # CartPole gives one for each step
    assert list(model.ep_info_buffer)[-1]["r"] == watch.episodes[-1]
    assert evaluate.best_mean_reward > 0


def test_the_logger_has_what_users_of_sb3_know() -> None:
    written = []
    for model in (make(), DQN("MlpPolicy", "CartPole-v1", learning_starts=50, policy_kwargs=dict(NETWORK), seed=0)):
        keep = Keep()
        model.set_logger(Logger(None, [keep]))
        model.learn(400, log_interval=2)
        written.append(keep.rows[-1])
    ours, theirs = written
    assert {"rollout/ep_rew_mean", "time/fps", "rollout/exploration_rate", "train/loss"} <= theirs.keys()
    assert theirs.keys() <= ours.keys()
    assert {"collectors/bytes_per_transition", "collectors/weights_behind"} <= ours.keys() - theirs.keys()
    assert ours["collectors/segments_lost"] == 0
    assert ours["time/fps"] > 0


@pytest.mark.filterwarnings("ignore:rich is experimental")
@pytest.mark.parametrize(("algorithm", "n_envs"), [(DQN, 2), (PPO, 4)])
def test_the_progress_bar_counts_the_steps_of_the_collectors(
    algorithm: Any, n_envs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bar(learner_module._ProgressBar):
        def _on_training_end(self) -> None:
            shown.append(self.pbar.n)
            super()._on_training_end()

    shown: list[int] = []
    monkeypatch.setattr(learner_module, "_ProgressBar", Bar)
    options = {"n": 2, "envs": 2, "in_process": True}
    given = {"learning_starts": 50} if algorithm is DQN else {"n_steps": 16, "batch_size": 16}
    model = distributed(algorithm)("MlpPolicy", "CartPole-v1", device="cpu", collectors=options, **given)
    assert model.n_envs == n_envs
    model.learn(128, callback=[Watch()], progress_bar=True)
    assert shown == [128]


def test_a_callback_can_end_the_training() -> None:
    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            return self.n_calls < 10

    model = make()
    model.learn(400, callback=Stop())
    assert model.num_timesteps == 20
    assert model._intake is None


def test_the_same_seed_gives_the_same_experience() -> None:
    buffers = []
    for _ in range(2):
        model = make()
        model.learn(200)
        buffers.append(model.replay_buffer)
    for first, second in zip(buffers[0].parts, buffers[1].parts, strict=True):
        np.testing.assert_array_equal(np.asarray(first.observations[:]), np.asarray(second.observations[:]))
    left, right = buffers[0].parts
    assert not np.array_equal(np.asarray(left.observations[:20]), np.asarray(right.observations[:20]))


@pytest.mark.parametrize("gradient_steps", [1, 3, -1])
def test_samples_per_insert(gradient_steps: int) -> None:
    options = {"train_freq": 4, "batch_size": 8, "gradient_steps": gradient_steps}
    model = make(collectors={"samples_per_insert": 16}, **options)
    model.learn(400)
    assert model._n_updates * 8 / (400 - 50) == pytest.approx(16, rel=0.1)


def test_collectors_are_never_far_ahead() -> None:
    model, most = make(collectors={"ahead": 1}), []

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            most.append(self.model._intake.n_waiting)
            return True

    model.learn(400, callback=Look())
    assert max(most) <= 2 * 8


def test_a_slow_learner_asks_for_fewer_segments() -> None:
    """Otherwise steps of all collectors would wait, and be old when they are consumed."""
    model, waiting, limits = make(collectors={"n": 8}, learning_starts=0), [], []

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            intake = self.model._intake  # type: ignore[attr-defined]
            waiting.append(intake.n_waiting)
            limits.append(intake._limit)
            outstanding = [*intake._credits, *(collector for collector, _ in intake._segments)]
            outstanding += [collector for collector, n in enumerate(intake._requested) for _ in range(n)]
            assert sorted(outstanding) == sorted([*range(8)] * 2)  # no credit is lost or made
            return True

    model.learn(3000, callback=Look())
    assert max(waiting[-300:]) <= 6 * 8  # of 16 segments of 8 steps
    assert max(limits[-300:]) <= 6
    assert min(model.collector_statistics.transitions) > 0.8 * max(model.collector_statistics.transitions)

    # The learner of this one is always the faster side.
    class Slow(LocalTransport):
        def replies(self, timeout: float) -> list[Reply]:
            return super().replies(timeout) if timeout else []

    slow = Slow()
    model = make(collectors={"n": 8}, learning_starts=0)
    with mock.patch.object(learner_module, "LocalTransport", return_value=slow):
        limits.clear()
        model.learn(1000, callback=Look())
    assert limits[-1] == 16


def test_weights_reach_the_collectors() -> None:
    model, transport = make(collectors={"sync_every": 10}), LocalTransport()
    differences = []

    class Compare(BaseCallback):
        def _on_step(self) -> bool:
            ours = self.model.policy.state_dict()
            for collector in (each for each in transport.collectors if each.version > 0):
                theirs = collector.model.policy.state_dict()
                differences.append(
                    max(float((ours[name] - theirs[name]).abs().max()) for name in ours if "target" not in name)
                )
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner_module, "LocalTransport", lambda: transport)
        model.learn(300, callback=Compare())
        assert model._n_updates > 20
    assert max(differences[:40]) == 0  # nothing was learnt yet
    assert 0 < max(differences) < 0.1


def test_environments_of_other_kinds() -> None:
    model = make(env=gym.make("CartPole-v1"), collectors={"make_env": lambda: gym.make("CartPole-v1")})
    model.learn(40)
    vec = make(
        env=gym.make("CartPole-v1"),
        collectors={"make_env": lambda: DummyVecEnv([lambda: Monitor(gym.make("CartPole-v1"))] * 2)},
    )
    vec.learn(40)
    assert vec.replay_buffer.size() > 0


def test_without_collectors_it_is_the_algorithm_itself() -> None:
    models = []
    for cls in (DQN, distributed(DQN)):
        model = cls("MlpPolicy", "CartPole-v1", seed=3, device="cpu", learning_starts=20, policy_kwargs=dict(NETWORK))
        models.append(model.learn(80))
    for first, second in zip(*(model.policy.parameters() for model in models), strict=True):
        assert (first == second).all()


@pytest.mark.parametrize(
    ("arguments", "error", "problem"),
    [
        ({"collectors": {"numbers": 3}}, ArgumentError, "'numbers'"),
        ({"collectors": {"n": 0}}, ConfigurationError, "n of collectors must be .* not 0"),
        ({"collectors": {"n": True}}, ConfigurationError, "n of collectors must be .* not True"),
        ({"collectors": {"ahead": 1.5}}, ConfigurationError, "ahead of collectors must be .* not 1.5"),
        ({"collectors": {"samples_per_insert": -1}}, ConfigurationError, "samples_per_insert"),
        ({"env": gym.make("CartPole-v1")}, ConfigurationError, "make_env"),
        ({"collectors": {"samples_per_insert": float("inf")}}, ConfigurationError, "samples_per_insert"),
        ({"replay_buffer_class": CompressedReplayBuffer}, ConfigurationError, "ShardedReplayBuffer"),
        (
            {
                "env": VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")])),
                "collectors": {"make_env": lambda: gym.make("CartPole-v1")},
            },
            ConfigurationError,
            "VecNormalize",
        ),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        make(**arguments)


def test_numbers_of_collectors_may_be_those_of_numpy() -> None:
    model = make(collectors={"n": np.int64(2), "envs": np.uint8(2)})
    model.learn(40)
    assert [part.size() > 0 for part in model.replay_buffer.parts] == [True, True]
    assert {type(model.collectors[name]) for name in ("n", "envs")} == {int}


def test_what_collectors_do_not_support_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="in steps"):
        make(train_freq=(1, "episode")).learn(10)
    with pytest.raises(ConfigurationError, match="make_env returned a VecNormalize"):
        make(collectors={"make_env": lambda: VecNormalize(make_vec_env("CartPole-v1", 2))}).learn(10)
    with pytest.raises(ConfigurationError, match="off-policy"):
        distributed(ARS)
