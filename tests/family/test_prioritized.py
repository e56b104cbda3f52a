"""Prioritized replay against a slow reference, which knows no tree and computes everything anew, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN, TD3
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.utils import LinearSchedule

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.compressed.prioritized_buffer import (
    CompressedDictPrioritizedReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    PrioritizedReplayBufferSamples,
)
from sb3_extra_buffers.compressed.prioritized_dqn import PrioritizedDQN
from sb3_extra_buffers.distributed import ShardedReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError, EmptyBufferError
from tests.environments import SpaceEnv
from tests.family.helpers import DICT, METHODS, SLOTS, STACK, VECTOR, VECTORS, small_net, transitions, vec_env
from tests.transitions import add_to_replay, assert_same

ALPHA, BETA, EPSILON = 0.7, 0.5, 1e-3
OPTIONS = {"alpha": ALPHA, "beta": BETA, "epsilon": EPSILON}


class Reference:
    """One of SB3's buffers and a list of TD errors."""

    alpha, beta, epsilon = ALPHA, BETA, EPSILON

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self.errors: dict[tuple[int, int], float] = {}
        self.largest = 1.0 - EPSILON

    def add(self, *transition: Any) -> None:
        for env in range(self.buffer.n_envs):
            self.errors[self.buffer.pos, env] = self.largest
        self.buffer.add(*transition)

    def probabilities(self) -> dict[tuple[int, int], float]:
        priorities = {place: (self.errors[place] + self.epsilon) ** self.alpha for place in sorted(self.errors)}
        total = math.fsum(priorities.values())
        return {place: priority / total for place, priority in priorities.items()}

    def draw(self, batch_size: int) -> tuple[list[tuple[int, int]], list[float]]:
        """Places in the buffer and their weights."""
        probabilities = self.probabilities()
        places = []
        for strip, offset in enumerate(np.random.random_sample(batch_size)):
            height = (strip + offset) / batch_size
            for place, probability in probabilities.items():  # noqa: B007
                height -= probability
                if height < 0:
                    break
            places.append(place)
        weights = [(len(probabilities) * probabilities[place]) ** -self.beta for place in places]
        return places, [weight / max(weights) for weight in weights]

    def samples_at(self, places: list[tuple[int, int]]) -> ReplayBufferSamples:
        """One by one, each through SB3's own method with the environment that it is to draw."""
        found = []
        for slot, env in places:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(np.random, "randint", lambda *args, env=env, **kwargs: np.array([env]))
                found.append(self.buffer._get_samples(np.array([slot])))
        columns = zip(*found, strict=True)
        return ReplayBufferSamples(*(None if column[0] is None else th.cat(column) for column in columns))

    def update(self, places: list[tuple[int, int]], errors: list[float]) -> None:
        for place, error in zip(places, errors, strict=True):
            self.errors[place] = abs(error)
        self.largest = max(self.largest, *map(abs, errors))


def pair(
    space: spaces.Space = VECTOR, n_envs: int = 2, n_steps: int = 1, slots: int = SLOTS, **kwargs: Any
) -> tuple[Reference, CompressedPrioritizedReplayBuffer]:
    arguments = (slots * n_envs, space, spaces.Discrete(5), "cpu", n_envs)
    plain = NStepReplayBuffer(*arguments, n_steps=n_steps) if n_steps > 1 else ReplayBuffer(*arguments)
    return Reference(plain), CompressedPrioritizedReplayBuffer(*arguments, n_steps=n_steps, **{**OPTIONS, **kwargs})


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_like_the_reference(method: str, n_steps: int) -> None:
    rng = np.random.default_rng(0)
    reference, buffer = pair(STACK, n_steps=n_steps, compression_method=method)
    for count, transition in enumerate(transitions(STACK, 100, n_envs=2), 1):
        add_to_replay([reference, buffer], transition)  # type: ignore[list-item]
        if count in (1, 2, 30, SLOTS, SLOTS + 1, 100):
            np.random.seed(count)
            places, weights = reference.draw(32)
            np.random.seed(count)
            batch = buffer.sample(32)
            assert isinstance(batch, PrioritizedReplayBufferSamples)
            assert [divmod(index, 2) for index in batch.indices.tolist()] == places
            assert_same(tuple(batch[:6]), tuple(reference.samples_at(places)))
            np.testing.assert_allclose(batch.weights.numpy()[:, 0], weights, atol=1e-6)
            assert batch.weights.shape == (32, 1)
            assert batch.weights.max() == 1
            errors = {place: rng.normal() for place in places}
            reference.update(places, [errors[place] for place in places])
            buffer.update_priorities(batch.indices, th.tensor([[errors[place]] for place in places]))


def test_frequencies() -> None:
    """Pearson's chi-square test, one draw at a time: strips would make it too easy to pass."""
    _, buffer = pair(n_envs=1, slots=30, alpha=1.0)
    for transition in transitions(VECTOR, 45):
        add_to_replay([buffer], transition)
    errors = np.random.default_rng(0).exponential(size=30) + 0.2
    buffer.update_priorities(np.arange(30), errors)
    np.random.seed(0)
    n_draws = 3000
    counts = np.bincount([buffer.sample(1).indices[0] for _ in range(n_draws)], minlength=30)
    expected = n_draws * (errors + EPSILON) / (errors + EPSILON).sum()
    statistic = np.sum((counts - expected) ** 2 / expected)
    assert statistic < 49.6  # exceeded once in a hundred times with 29 degrees of freedom
    in_strips = np.bincount(np.concatenate([buffer.sample(64).indices for _ in range(100)]), minlength=30)
    np.testing.assert_allclose(in_strips / 6400, expected / n_draws, atol=0.01)


def test_alpha_zero_draws_all_alike() -> None:
    _, buffer = pair(n_envs=1, slots=20, alpha=0.0)
    for transition in transitions(VECTOR, 20):
        add_to_replay([buffer], transition)
    buffer.update_priorities(np.arange(20), np.arange(20.0))
    batch = buffer.sample(20)
    assert batch.indices.tolist() == list(range(20))
    assert (batch.weights == 1).all()


def test_dict() -> None:
    buffer = CompressedDictPrioritizedReplayBuffer(2 * SLOTS, DICT, spaces.Discrete(5), "cpu", 2, n_steps=2)
    boxes = {key: pair(space, n_steps=2)[1] for key, space in DICT.spaces.items()}
    for transition in transitions(DICT, 90, 2):
        add_to_replay([buffer], transition)
        for key, box in boxes.items():
            box.add(transition.obs[key], transition.next_obs[key], *transition[2:])
    np.random.seed(0)
    batch = buffer.sample(20)
    for key, box in boxes.items():
        np.random.seed(0)
        expected = box.sample(20)
        assert_same(batch.observations[key], expected.observations)
        assert_same(batch.next_observations[key], expected.next_observations)
        assert_same(tuple(batch[3:]), tuple(expected[3:]))


def test_memory_optimisation_never_draws_what_was_overwritten() -> None:
    _, buffer = pair(n_envs=2, slots=10, optimize_memory_usage=True, handle_timeout_termination=False)
    previous = None
    for transition in transitions(VECTOR, 35, 2):
        add_to_replay([buffer], transition)
        if previous is not None:
            buffer.update_priorities(previous.indices, np.ones(40))  # late: one of them may be gone by now
        previous = buffer.sample(40)
        if buffer.full:
            assert buffer.pos not in previous.indices // 2
            assert len(set(previous.indices // 2)) == 9


def test_beta_schedule() -> None:
    _, buffer = pair(beta=LinearSchedule(0.4, 1.0, 1.0))
    assert buffer.beta == pytest.approx(0.4)
    buffer.progress_remaining = 0.5
    assert buffer.beta == pytest.approx(0.7)


def test_reset_forgets_priorities() -> None:
    _, buffer = pair()
    for transition in transitions(VECTOR, 10, 2):
        add_to_replay([buffer], transition)
    buffer.reset()
    with pytest.raises(EmptyBufferError):
        buffer.sample(4)
    add_to_replay([buffer], transition)
    assert set(buffer.sample(20).indices) == {0, 1}


def test_more_than_is_stored() -> None:
    _, buffer = pair(n_envs=1)
    add_to_replay([buffer], next(transitions(VECTOR, 1)))
    batch = buffer.sample(300)
    assert len(batch.rewards) == 300
    assert (batch.weights == 1).all()
    assert len(buffer.sample(0).rewards) == 0


def test_no_errors_at_all_is_uniform() -> None:
    _, buffer = pair(n_envs=1, slots=16)
    for transition in transitions(VECTOR, 16):
        add_to_replay([buffer], transition)
    buffer.update_priorities(np.arange(16), np.zeros(16))
    assert buffer.sample(16).indices.tolist() == list(range(16))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_errors_that_are_no_numbers(bad: float) -> None:
    _, buffer = pair(n_envs=1)
    for transition in transitions(VECTOR, 16):
        add_to_replay([buffer], transition)
    before = buffer._tree.total
    with pytest.raises(ConfigurationError, match="1 of 3 TD errors are NaN or infinite"):
        buffer.update_priorities(np.arange(3), th.tensor([1.0, bad, 2.0]))
    assert buffer._tree.total == before


def test_wrong_number_of_errors() -> None:
    _, buffer = pair()
    with pytest.raises(ConfigurationError, match="3 transitions need 3 TD errors, not 2"):
        buffer.update_priorities(np.arange(3), [1.0, 2.0])


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("alpha", -0.1, "alpha must be from 0 to 1, not -0.1"),
        ("alpha", 2.0, "alpha must be from 0 to 1, not 2.0"),
        ("beta", 1.5, "beta must be from 0 to 1, or a schedule, not 1.5"),
        ("epsilon", 0.0, "epsilon must be a number above 0, not 0.0"),
        ("epsilon", np.nan, "epsilon must be a number above 0, not nan"),
    ],
)
def test_impossible_options(option: str, value: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        pair(**{option: value})


def test_counts_its_tree_as_memory() -> None:
    _, buffer = pair(n_envs=1, slots=20)
    plain = CompressedReplayBuffer(20, VECTOR, spaces.Discrete(5))
    for transition in transitions(VECTOR, 20):
        add_to_replay([buffer, plain], transition)
    assert buffer.memory_usage().index == plain.memory_usage().index + buffer._tree.nbytes


class ReferenceDQN(DQN):
    """What :class:`PrioritizedDQN` should do, transition by transition."""

    def _setup_model(self) -> None:
        super()._setup_model()
        assert self.replay_buffer is not None
        self.reference = Reference(self.replay_buffer)

    def _store_transition(self, replay_buffer: Any, *args: Any, **kwargs: Any) -> None:
        super()._store_transition(self.reference, *args, **kwargs)  # type: ignore[arg-type]

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        self.reference.beta = 1 - 0.5 * self._current_progress_remaining
        losses = []
        for _ in range(gradient_steps):
            places, weights = self.reference.draw(batch_size)
            batch = self.reference.samples_at(places)
            loss, errors = th.zeros(()), []
            for i, weight in enumerate(weights):
                with th.no_grad():
                    discount = self.gamma if batch.discounts is None else batch.discounts[i]
                    next_value = self.q_net_target(batch.next_observations[i : i + 1]).max()
                    target = batch.rewards[i] + (1 - batch.dones[i]) * discount * next_value
                error = target - self.q_net(batch.observations[i : i + 1])[0, batch.actions[i]]
                huber = 0.5 * error**2 if abs(error) < 1 else abs(error) - 0.5
                loss = loss + weight * huber.squeeze() / batch_size
                errors.append(error.item())
            self.policy.optimizer.zero_grad()
            loss.backward()
            th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            self.reference.update(places, errors)
            losses.append(loss.item())
        self.logger.record("train/loss", np.mean(losses))


@pytest.mark.parametrize("n_steps", [1, 3])
def test_training_like_the_reference(n_steps: int) -> None:
    arguments: dict[str, Any] = {
        "learning_starts": 40,
        "buffer_size": 80,
        "batch_size": 8,
        "train_freq": 4,
        "gradient_steps": 3,
        "target_update_interval": 40,
        "policy_kwargs": small_net(),
        "gamma": 0.9,
        "n_steps": n_steps,
        "seed": 0,
    }
    weights, losses = [], []
    for cls, kwargs in ((ReferenceDQN, {}), (PrioritizedDQN, {**OPTIONS, "beta": LinearSchedule(0.5, 1.0, 1.0)})):
        model = cls("MlpPolicy", vec_env(VECTOR, 2), replay_buffer_kwargs=kwargs, **arguments)
        before = model.q_net.state_dict()["q_net.0.weight"].clone()
        weights.append(model.learn(120, log_interval=None).q_net.state_dict())
        losses.append(model.logger.name_to_value["train/loss"])
        assert not th.equal(before, weights[-1]["q_net.0.weight"])
    for key, expected in weights[0].items():
        th.testing.assert_close(weights[1][key], expected, rtol=0, atol=1e-6)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_prioritized_dqn_with_dict() -> None:
    env = SpaceEnv(VECTORS)
    model = PrioritizedDQN("MultiInputPolicy", env, buffer_size=100, learning_starts=20, batch_size=8, n_steps=2)
    model.learn(40)
    assert type(model.replay_buffer) is CompressedDictPrioritizedReplayBuffer
    assert model.replay_buffer.n_steps == 2
    assert len(set(model.replay_buffer._tree[np.arange(40)])) > 10


def test_prioritized_dqn_needs_priorities() -> None:
    with pytest.raises(ConfigurationError, match="CompressedReplayBuffer has no priorities"):
        PrioritizedDQN("MlpPolicy", SpaceEnv(VECTOR), buffer_size=10, replay_buffer_class=CompressedReplayBuffer)


def test_prioritized_dqn_needs_parts_with_priorities() -> None:
    for options in ({}, {"buffer_class": CompressedReplayBuffer}):
        with pytest.raises(ConfigurationError, match="The parts of the ShardedReplayBuffer have no priorities"):
            PrioritizedDQN(
                "MlpPolicy", SpaceEnv(VECTOR), replay_buffer_class=ShardedReplayBuffer, replay_buffer_kwargs=options
            )
    priorities = {"buffer_class": CompressedPrioritizedReplayBuffer}
    PrioritizedDQN(
        "MlpPolicy",
        SpaceEnv(VECTOR),
        buffer_size=100,
        learning_starts=4,
        replay_buffer_class=ShardedReplayBuffer,
        replay_buffer_kwargs=priorities,
    ).learn(10)


class PrioritizedTD3(TD3):
    """The hook, as another algorithm would use it."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        for _ in range(gradient_steps):
            batch = self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)
            with th.no_grad():
                next_actions = self.actor_target(batch.next_observations)
                next_values = th.cat(self.critic_target(batch.next_observations, next_actions), dim=1).amin(
                    1, keepdim=True
                )
                targets = batch.rewards + (1 - batch.dones) * self.gamma * next_values
            errors = targets - th.cat(self.critic(batch.observations, batch.actions), dim=1)
            self.critic.optimizer.zero_grad()
            (batch.weights * errors**2).mean().backward()
            self.critic.optimizer.step()
            self.replay_buffer.update_priorities(batch.indices, errors.mean(dim=1))


@pytest.mark.parametrize("cls", [TD3, PrioritizedTD3])
def test_other_algorithms(cls: type[TD3]) -> None:
    """An algorithm that knows nothing of priorities leaves them all alike."""
    env = SpaceEnv(VECTOR, spaces.Box(-1, 1, (2,), np.float32))
    arguments = {"buffer_size": 100, "learning_starts": 20, "batch_size": 8, "policy_kwargs": small_net()}
    model = cls("MlpPolicy", env, replay_buffer_class=CompressedPrioritizedReplayBuffer, **arguments).learn(50)
    assert (len(set(model.replay_buffer._tree[np.arange(50)])) > 1) == (cls is PrioritizedTD3)
