"""Collectors in one process: how they explore, the priorities that they compute, and what happens when they die."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch as th
from stable_baselines3 import PPO, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.dqn.policies import DQNPolicy

from sb3_extra_buffers.compressed import PrioritizedDQN
from sb3_extra_buffers.compressed.prioritized_buffer import (
    CompressedDictPrioritizedReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    PrioritizedReplayBufferSamples,
)
from sb3_extra_buffers.distributed import ape_x
from sb3_extra_buffers.distributed import learner as learner_module
from sb3_extra_buffers.distributed.transport import LocalTransport, Reply
from sb3_extra_buffers.errors import ArgumentError, WorkerError
from tests.distributed.test_learner import make
from tests.distributed.test_on_policy import N_ENVS, N_STEPS, Game, make_vec_env
from tests.distributed.test_on_policy import assert_same as assert_same_weights
from tests.distributed.test_on_policy import make as make_on_policy


class DyingTransport(LocalTransport):
    """Every fifth request kills its collector."""

    every = 5

    def __init__(self) -> None:
        super().__init__()
        self.n_requests = 0
        self.restarts: list[int] = []

    def replies(self, timeout: float) -> list[Reply]:
        self.n_requests += 1
        if self.n_requests % self.every == 0 and self._requests:
            return [Reply(self._requests[0][0], None, "killed")]
        return super().replies(timeout)

    def restart(self, collector: int, seed: int | None) -> None:
        self.restarts.append(collector)
        super().restart(collector, seed)


def test_a_collector_that_dies_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = DyingTransport()
    monkeypatch.setattr(learner_module, "LocalTransport", lambda: transport)
    model = make()
    model.learn(600)
    assert len(transport.restarts) > 3
    assert model.num_timesteps == 600
    model.replay_buffer.check()
    for part in model.replay_buffer.parts:
        later, now = part.observations[1 : part.size()], part.next_observations[: part.size() - 1]
        continued = (np.asarray(later) == np.asarray(now)).all(axis=-1)
        ended = (part.dones + part.timeouts)[: part.size() - 1] > 0
        assert (continued | ended).all()


def test_replies_of_a_collector_that_was_replaced_are_ignored() -> None:
    """The first of two replies is damaged. The second one is of the same collector, which is gone."""

    class Eager(LocalTransport):
        n_damaged = 0

        def replies(self, timeout: float) -> list[Reply]:
            replies = [reply for _ in range(len(self._requests)) for reply in super(Eager, self).replies(timeout)]
            if len({reply.collector for reply in replies}) < len(replies) and self.n_damaged < 3:
                self.n_damaged += 1
                segment: Any = replies[0].segment
                replies[0] = replies[0]._replace(segment=segment[:-9])
            return replies

    class Count(BaseCallback):
        def _on_step(self) -> bool:
            intake = self.model._intake  # type: ignore[attr-defined]
            outstanding = [*intake._credits, *(collector for collector, _ in intake._segments)]
            outstanding += [collector for collector, n in enumerate(intake._requested) for _ in range(n)]
            assert sorted(outstanding) == sorted([*range(2)] * 2)  # no credit is lost or made
            return True

    transport, model = Eager(), make()
    with mock.patch.object(learner_module, "LocalTransport", return_value=transport):
        model.learn(300, callback=Count())
    assert transport.n_damaged == model.collector_statistics.n_deaths == 3


class Counted(Game):
    """Counts environments that were made and not closed."""

    n_open = n_made = 0

    def __init__(self) -> None:
        super().__init__()
        Counted.n_made += 1
        Counted.n_open += 1

    def close(self) -> None:
        Counted.n_open -= 1


def test_the_environments_of_collectors_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "n_open", 0)
    monkeypatch.setattr(Counted, "n_made", 0)
    transport = DyingTransport()
    monkeypatch.setattr(learner_module, "LocalTransport", lambda: transport)
    model = make(env=Game(), collectors={"make_env": Counted})
    model.learn(200)
    assert Counted.n_made == 2 * (2 + len(transport.restarts)) > 4
    assert Counted.n_open == 0


def test_environments_are_closed_if_a_later_one_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "n_open", 0)
    monkeypatch.setattr(Counted, "n_made", 0)

    def make_env() -> Counted:
        if Counted.n_made == 2:
            raise OSError("no game here")
        return Counted()

    with pytest.raises(OSError, match="no game"):
        make(env=Game(), collectors={"make_env": make_env}).learn(200)
    assert Counted.n_open == 0


def test_a_collector_that_always_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = DyingTransport()
    transport.every = 1
    monkeypatch.setattr(learner_module, "LocalTransport", lambda: transport)
    with pytest.raises(WorkerError, match=r"died 5 times.*killed"):
        make().learn(100)


def test_a_damaged_segment_is_lost_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Damaging(DyingTransport):
        def replies(self, timeout: float) -> list[Reply]:
            replies = LocalTransport.replies(self, timeout)
            self.n_requests += 1
            if self.n_requests % 7 == 0:
                replies = [reply._replace(segment=reply.segment[:-9]) for reply in replies if reply.segment is not None]
            return replies

    transport = Damaging()
    monkeypatch.setattr(learner_module, "LocalTransport", lambda: transport)
    model = make()
    model.learn(300)
    assert transport.restarts
    model.replay_buffer.check()


def test_exploration_may_differ_between_learner_and_collectors() -> None:
    model = make(collectors={"algorithm_kwargs": {"exploration_initial_eps": 0.0, "exploration_final_eps": 0.0}})
    model.learn(100)
    assert model.exploration_rate > 0


def test_exploration_may_differ_between_collectors() -> None:
    """Epsilons as in Ape-X, and action noise."""
    rates = [ape_x(number, 4)["exploration_final_eps"] for number in range(4)]
    assert rates[0] == 0.4
    assert rates == sorted(rates, reverse=True)
    assert rates[3] == pytest.approx(0.4**8)
    assert ape_x(0, 1)["exploration_final_eps"] == 0.4
    spy = Spy()
    with spy.watching():
        make(collectors={"algorithm_kwargs": ape_x}).learn(100)
    assert [collector.model.exploration_rate for collector in spy.seen] == [0.4, pytest.approx(0.4**8)]

    def noise(number: int, n: int) -> dict[str, Any]:
        return {"action_noise": NormalActionNoise(np.zeros(1), np.full(1, float(number + n)))}

    for algorithm in (SAC, TD3):
        spy = Spy()
        with spy.watching():
            make(algorithm, "Pendulum-v1", collectors={"algorithm_kwargs": noise}).learn(100)
        assert [collector.model.action_noise.noises[0]._sigma[0] for collector in spy.seen] == [2.0, 3.0]
    with pytest.raises(ArgumentError, match="DQN has no argument 'epsilon'"):
        make(collectors={"algorithm_kwargs": lambda number, n: {"epsilon": 1}}).learn(10)


class Spy(LocalTransport):
    """Keeps the collectors after the learner has stopped them."""

    def watching(self) -> Any:
        return mock.patch.object(learner_module, "LocalTransport", return_value=self)

    def start(self, *arguments: Any) -> None:
        super().start(*arguments)
        self.seen = list(self.collectors)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_first_priorities_come_from_the_collectors(n_steps: int) -> None:
    """They are what the model of the collector thinks of its transitions."""
    options = {"alpha": 0.7, "epsilon": 0.01, "n_steps": n_steps, "gamma": 0.9}
    model = make(
        PrioritizedDQN,
        gamma=0.9,
        learning_starts=10_000,  # no training: weights and priorities stay as they are
        replay_buffer_kwargs=options,
        collectors={"algorithm_kwargs": {"learning_starts": 0}},
    )
    with th.no_grad():
        for parameter in model.policy.parameters():
            parameter.mul_(3.0)
    model.q_net_target.load_state_dict(model.q_net.state_dict())  # collectors have no other
    model.learn(200)
    for part in model.replay_buffer.parts:
        assert isinstance(part, CompressedPrioritizedReplayBuffer)
        n = part.size() * 2
        found = part._tree[np.arange(n)]
        assert len(np.unique(found)) > n / 2
        samples = part._samples_at(*np.divmod(np.arange(n), 2), None)
        batch = PrioritizedReplayBufferSamples._make([*samples, None, None])
        expected = (model.td_errors(batch).abs().numpy().ravel().astype(np.float64) + 0.01) ** 0.7
        complete = np.arange(n) // 2 % 8 < 8 - (n_steps - 1)  # in a segment of 8 steps
        np.testing.assert_allclose(found[complete], expected[complete], rtol=1e-4)
        assert part.max_priority == pytest.approx(max(1.0, (found ** (1 / 0.7)).max()))
    model.learning_starts = 0
    model.learn(100, reset_num_timesteps=False)
    assert model._n_updates > 0


def test_priorities_of_dict_observations() -> None:
    game = partial(Game, is_dict=True)
    model = make(PrioritizedDQN, game(), policy="MultiInputPolicy", collectors={"make_env": game})
    model.learn(100)
    assert all(isinstance(part, CompressedDictPrioritizedReplayBuffer) for part in model.replay_buffer.parts)
    assert model._n_updates > 0


class WithSubmodule(ActorCriticPolicy):
    """A network named as that of an off-policy algorithm, which is only a part of what acts."""

    name: str

    def _build_mlp_extractor(self) -> None:
        super()._build_mlp_extractor()
        setattr(self, self.name, self.mlp_extractor.policy_net)


class WithActor(WithSubmodule):
    name = "actor"


class WithQNet(WithSubmodule):
    name = "q_net"


@pytest.mark.parametrize("policy", [WithActor, WithQNet])
def test_collectors_get_all_weights_of_a_policy_of_ones_own(policy: Any) -> None:
    given = {"seed": 5, "n_steps": N_STEPS, "batch_size": 8, "n_epochs": 2, "policy_kwargs": {"net_arch": [8]}}
    collectors = {"n": 1, "make_env": partial(make_vec_env, Game)}
    expected = PPO(policy, make_vec_env(Game), device="cpu", **given)
    ours = make_on_policy(env=Game(), policy=policy, collectors=collectors, **given)
    for model in (expected, ours):
        model.learn(3 * N_STEPS * N_ENVS)
    assert_same_weights(ours, expected)


class WithScale(DQNPolicy):
    """The greedy action depends on a layer outside of the Q network."""

    def _build(self, lr_schedule: Any) -> None:
        self.scale = th.nn.Linear(2, 2)
        super()._build(lr_schedule)

    def _predict(self, obs: Any, deterministic: bool = True) -> th.Tensor:
        return self.scale(self.q_net(obs)).argmax(dim=1).reshape(-1)


def test_collectors_get_the_layers_that_an_off_policy_policy_adds() -> None:
    spy = Spy()
    model = make(policy=WithScale)
    with th.no_grad():
        model.policy.scale.weight.mul_(-3.0)
    with spy.watching():
        model.learn(40)
    for collector in spy.seen:
        assert th.equal(collector.model.policy.scale.weight, model.policy.scale.weight)
