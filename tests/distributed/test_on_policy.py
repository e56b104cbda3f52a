"""PPO and its relatives with collectors, next to SB3's own."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from sb3_contrib import TRPO, MaskablePPO, RecurrentPPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.compressed.rollout_buffer import CompressedDictRolloutBuffer
from sb3_extra_buffers.distributed import distributed
from sb3_extra_buffers.distributed import learner as learner_module
from sb3_extra_buffers.distributed.rollouts import ShardedDictRolloutBuffer, ShardedRolloutBuffer
from sb3_extra_buffers.distributed.transport import LocalTransport, Reply
from sb3_extra_buffers.errors import ArgumentError, ConfigurationError, EmptyBufferError, WorkerError

NETWORK = {"net_arch": [8]}
N_STEPS, N_ENVS = 16, 3


class Game(gym.Env[Any, Any]):
    """Small images or dicts of them. Episodes end in both ways, after few steps, and rewards depend on the action."""

    action_space = gym.spaces.Discrete(3)

    def __init__(self, is_dict: bool = False) -> None:
        self.is_dict = is_dict
        image = gym.spaces.Box(0, 255, (8, 8), np.uint8)
        self.observation_space: Any = (
            gym.spaces.Dict({"image": image, "place": gym.spaces.Box(-1, 1, (2,), np.float32)}) if is_dict else image
        )

    def observation(self) -> Any:
        image = np.zeros((8, 8), np.uint8)
        image[self.place % 8, self.steps % 8] = 200
        return {"image": image, "place": self.np_random.random(2, np.float32)} if self.is_dict else image

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.place = 0, int(self.np_random.integers(8))
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.place += int(action) - 1
        info = {"is_success": self.place > 4}
        over = self.place < 0
        return self.observation(), float(self.place) / 7 + 0.1 * int(action), over, self.steps >= 7 and not over, info


def make_vec_env(make: Any) -> DummyVecEnv:
    return DummyVecEnv([lambda: Monitor(make())] * N_ENVS)


def make(algorithm: Any = PPO, env: Any = "CartPole-v1", collectors: Any = None, **arguments: Any) -> Any:
    options = {"n": 2, "envs": N_ENVS, "in_process": True, **(collectors or {})}
    given = {"seed": 5, "n_steps": N_STEPS, "policy_kwargs": dict(NETWORK), "device": "cpu"}
    given |= {"batch_size": 8, "n_epochs": 2} if algorithm is PPO else {}
    policy = arguments.pop("policy", "MlpPolicy")
    return distributed(algorithm)(policy, env, collectors=options, **given | arguments)


class Watch(BaseCallback):
    """Everything that a callback can see of a step and of a rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def _on_rollout_start(self) -> None:
        self.seen.append("start")

    def _on_step(self) -> bool:
        infos = [
            {"episode": info.get("episode", {}).get("r"), "length": info.get("episode", {}).get("l")}
            | {"is_success": float(info["is_success"]) if done and "is_success" in info else None}
            for info, done in zip(self.locals["infos"], self.locals["dones"], strict=True)
        ]
        names = ("rewards", "dones", "actions", "values", "log_probs", "n_steps")
        numbers = [self.locals[name].tolist() if name != "n_steps" else self.locals[name] for name in names]
        self.seen.append((self.num_timesteps, *numbers, infos))
        return True

    def _on_rollout_end(self) -> None:
        buffer = self.model.rollout_buffer  # type: ignore[attr-defined]
        self.seen.append([np.array(getattr(buffer, name)) for name in CompressedRolloutBuffer._saved_fields])


class Keep(KVWriter):
    """What was logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, key_values: dict[str, Any], *_: Any) -> None:
        self.rows.append(dict(key_values))

    def without_times(self) -> list[dict[str, Any]]:
        of_machine = ("time/fps", "time/time_elapsed", "collectors/")
        return [{name: value for name, value in row.items() if not name.startswith(of_machine)} for row in self.rows]

    def close(self) -> None:
        pass


def assert_same(first: Any, second: Any) -> None:
    """The same weights, to the bit, and the same for everything that was seen."""
    for (name, left), right in zip(first.policy.state_dict().items(), second.policy.state_dict().values(), strict=True):
        assert left.numpy().tobytes() == right.numpy().tobytes(), name


@pytest.mark.parametrize(
    ("algorithm", "policy", "env", "arguments"),
    [
        (PPO, "MlpPolicy", partial(gym.make, "CartPole-v1"), {}),
        (PPO, "MlpPolicy", Game, {"gae_lambda": 0.9, "gamma": 0.9}),
        (PPO, "MultiInputPolicy", partial(Game, is_dict=True), {}),
        (PPO, "MlpPolicy", partial(gym.make, "Pendulum-v1", max_episode_steps=9), {"use_sde": True}),
        (A2C, "MlpPolicy", Game, {}),
        (TRPO, "MlpPolicy", Game, {}),
    ],
)
def test_one_collector_gives_the_weights_of_sb3(
    algorithm: Any, policy: str, env: Any, arguments: dict[str, Any], tmp_path: Any
) -> None:
    given = {"seed": 5, "n_steps": N_STEPS, "policy_kwargs": dict(NETWORK), "device": "cpu", **arguments}
    given |= {} if algorithm is A2C else {"batch_size": 8}
    expected = algorithm(policy, make_vec_env(env), **given)
    collectors = {"n": 1, "envs": N_ENVS, "make_env": partial(make_vec_env, env), "in_process": True}
    ours = distributed(algorithm)(policy, env(), collectors=collectors, **given)
    assert_same(ours, expected)
    watches, kept = [], []
    for model in (expected, ours):
        watches.append(Watch())
        kept.append(Keep())
        model.set_logger(Logger(None, [kept[-1]]))
        model.learn(5 * N_STEPS * N_ENVS, callback=watches[-1], log_interval=1)
    assert_same(ours, expected)
    assert kept[0].without_times() == kept[1].without_times()
    assert "rollout/ep_rew_mean" in kept[0].rows[-1]
    assert len(watches[0].seen) == len(watches[1].seen) == 5 * (N_STEPS + 2)
    for left, right in zip(watches[0].seen, watches[1].seen, strict=True):
        np.testing.assert_equal(left, right)
    ours.save(tmp_path / "model")
    loaded = type(ours).load(tmp_path / "model", env=env())
    assert_same(loaded, expected)
    assert_same(algorithm.load(tmp_path / "model"), expected)
    loaded.learn(N_STEPS * N_ENVS, reset_num_timesteps=False)
    assert loaded.num_timesteps == 6 * N_STEPS * N_ENVS


class Spy(LocalTransport):
    """Keeps what was sent, and the weights with which it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: list[tuple[int, int, Any]] = []

    def replies(self, timeout: float) -> list[Reply]:
        replies = super().replies(timeout)
        for reply in replies:
            model: Any = self.collectors[reply.collector].model
            weights = np.concatenate([value.detach().numpy().ravel() for value in model.policy.parameters()])
            self.versions.append((reply.collector, self.collectors[reply.collector].version, weights))
        return replies


def test_every_part_of_a_rollout_is_made_with_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy()
    monkeypatch.setattr(learner_module, "LocalTransport", lambda: spy)
    model, before = make(), []

    class Look(BaseCallback):
        def _on_rollout_start(self) -> None:
            parameters = self.model.policy.parameters()
            before.append(np.concatenate([value.detach().numpy().ravel() for value in parameters]))

        def _on_step(self) -> bool:
            return True

    model.learn(4 * N_STEPS * 2 * N_ENVS, callback=Look())
    assert sorted(version[:2] for version in spy.versions) == [(c, v) for c in (0, 1) for v in (1, 2, 3, 4)]
    for _, version, weights in spy.versions:
        np.testing.assert_array_equal(weights, before[version - 1])
    # What the first collector makes in an iteration differs from what the second one makes.
    first, second = (part.log_probs for part in model.rollout_buffer.parts)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("is_dict", [False, True])
def test_batches_over_parts_are_those_of_one_buffer(is_dict: bool) -> None:
    """Random rollouts in three parts, and the same in SB3's buffer with all environments side by side."""
    game = Game(is_dict)
    spaces_ = (game.observation_space, game.action_space)
    rng = np.random.default_rng(2)
    sharded = (ShardedDictRolloutBuffer if is_dict else ShardedRolloutBuffer)(
        N_STEPS, *spaces_, "cpu", 0.9, 0.8, 3 * N_ENVS, parts=3
    )
    one: Any = (DictRolloutBuffer if is_dict else RolloutBuffer)(N_STEPS, *spaces_, "cpu", 0.9, 0.8, 3 * N_ENVS)
    part_class = CompressedDictRolloutBuffer if is_dict else CompressedRolloutBuffer
    senders: list[Any] = [part_class(N_STEPS, *spaces_, "cpu", 0.9, 0.8, N_ENVS) for _ in range(3)]
    import torch as th

    def split(value: Any, number: int) -> Any:
        if isinstance(value, dict):
            return {key: split(each, number) for key, each in value.items()}
        return value[number * N_ENVS : (number + 1) * N_ENVS]

    for _ in range(3):  # several rollouts, one after the other
        for buffer in (one, sharded, *senders):
            buffer.reset()
        with pytest.raises(EmptyBufferError, match="0 of 16"):
            sharded.get(8)
        for _ in range(N_STEPS):
            image = rng.integers(0, 255, (3 * N_ENVS, 8, 8)).astype(np.uint8)
            obs: Any = {"image": image, "place": rng.random((3 * N_ENVS, 2), np.float32)} if is_dict else image
            step = (
                obs,
                rng.integers(0, 3, (3 * N_ENVS, 1)),
                rng.random(3 * N_ENVS, np.float32),
                rng.random(3 * N_ENVS) < 0.2,
                th.from_numpy(rng.random((3 * N_ENVS, 1), np.float32)),
                th.from_numpy(rng.random(3 * N_ENVS, np.float32)),
            )
            one.add(*step)
            for number, sender in enumerate(senders):
                sender.add(*[split(value, number) for value in step])
        last, dones = th.from_numpy(rng.random((3 * N_ENVS, 1), np.float32)), rng.random(3 * N_ENVS) < 0.5
        one.compute_returns_and_advantage(last, dones)
        for number in (2, 0, 1):
            senders[number].compute_returns_and_advantage(split(last, number), split(dones, number))
            sharded.parts[number].ingest_segment(senders[number].export_segment())
        sharded.join()
        for name in CompressedRolloutBuffer._saved_fields:
            np.testing.assert_array_equal(getattr(sharded, name), getattr(one, name))
        pairs = [(sharded.observations, one.observations)]
        if is_dict:
            pairs = [(sharded.observations[key], one.observations[key]) for key in one.observations]  # type: ignore[call-overload]
        for ours, theirs in pairs:
            assert ours.shape == theirs.shape
            np.testing.assert_array_equal(np.asarray(ours), theirs)
            np.testing.assert_array_equal(ours[3, 4], theirs[3, 4])
        for batch_size in (7, None):
            batches = []
            for buffer in (one, sharded):
                np.random.seed(4)
                batches.append(list(buffer.get(batch_size)))
            assert len(batches[0]) == len(batches[1])
            for left, right in zip(*batches, strict=True):
                for field, expected in zip(right, left, strict=True):
                    for key in expected if isinstance(expected, dict) else [None]:
                        found, wanted = (field, expected) if key is None else (field[key], expected[key])
                        assert found.dtype == wanted.dtype
                        assert th.equal(found, wanted)
    with pytest.raises(NotImplementedError, match="ingest_segment"):
        sharded.add()


class Failing(LocalTransport):
    """Some requests are never answered, because the collector died; some replies arrive damaged."""

    def __init__(self, dies: Any, damages: Any = lambda number: False) -> None:
        super().__init__()
        self.dies, self.damages, self.n_requests, self.restarts = dies, damages, 0, []  # type: ignore[var-annotated]

    def replies(self, timeout: float) -> list[Reply]:
        self.n_requests += 1
        if self.dies(self.n_requests):
            return [Reply(self._requests.popleft()[0], None, "killed by the test")]
        replies = super().replies(timeout)
        if self.damages(self.n_requests):
            replies = [reply._replace(segment=reply.segment[:-9]) for reply in replies if reply.segment is not None]
        return replies

    def restart(self, collector: int, seed: int | None) -> None:
        self.restarts.append((collector, seed))
        super().restart(collector, seed)


def test_what_a_dead_collector_did_not_finish_is_collected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = Failing(lambda number: number in (1, 4, 5, 8), lambda number: number in (6, 9))
    monkeypatch.setattr(learner_module, "LocalTransport", lambda: transport)
    model, complete = make(), []

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            complete.append(self.model.rollout_buffer.full)  # type: ignore[attr-defined]
            for collector in transport.collectors:  # those that were started again, too, had the newest weights
                assert_same(collector.model, self.model)
            for part in self.model.rollout_buffer.parts:  # type: ignore[attr-defined]
                part.check()

    model.learn(4 * N_STEPS * 2 * N_ENVS, callback=Look())
    assert complete == [True] * 4
    assert model.num_timesteps == 4 * N_STEPS * 2 * N_ENVS
    assert len(transport.restarts) == model.collector_statistics.n_deaths == 6
    assert len({seed for _, seed in transport.restarts}) == 6


def test_a_new_collector_begins_new_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = Failing(lambda number: number == 3)
    monkeypatch.setattr(learner_module, "LocalTransport", lambda: transport)
    starts = []

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            starts.append(self.model.rollout_buffer.episode_starts[0].reshape(2, N_ENVS).all(axis=1).tolist())  # type: ignore[attr-defined]

    make(env=gym.make("CartPole-v1"), collectors={"make_env": partial(gym.make, "CartPole-v1")}).learn(
        2 * N_STEPS * 2 * N_ENVS, callback=Look()
    )
    assert transport.restarts
    assert starts[0] == [True, True]
    assert starts[1][transport.restarts[0][0]]


def test_a_collector_that_always_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "LocalTransport", lambda: Failing(lambda number: True))
    with pytest.raises(WorkerError, match=r"5 times.*killed by the test"):
        make().learn(1000)


def test_each_call_of_learn_has_environments_of_its_own() -> None:
    model, first = make(), []
    for _ in range(2):
        model.learn(N_STEPS * 2 * N_ENVS)
        first.append(np.asarray(model.rollout_buffer.parts[0].observations)[0])
    assert not np.array_equal(*first)
    assert model._collector_starts == [2, 2]


def test_a_callback_ends_the_training() -> None:
    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            return self.n_calls < 10

    model = make()
    model.learn(4000, callback=Stop())
    assert model.num_timesteps == 10 * 2 * N_ENVS
    assert model._intake is None


def test_options_of_the_buffer_and_without_collectors() -> None:
    model = make(
        rollout_buffer_class=CompressedRolloutBuffer,
        rollout_buffer_kwargs={"compression_method": "none"},
        env="CartPole-v1",
    )
    model.learn(N_STEPS * 2 * N_ENVS)
    assert model.num_timesteps == N_STEPS * 2 * N_ENVS
    models = []
    for cls in (PPO, distributed(PPO)):
        models.append(cls("MlpPolicy", "CartPole-v1", seed=3, n_steps=64, device="cpu").learn(128))
    assert_same(*models)


def test_the_warning_about_batches_counts_all_environments() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(batch_size=32).learn(N_STEPS * 2 * N_ENVS)  # more than 16 steps of one environment
    with pytest.warns(UserWarning, match="= 96 transitions.* only 26"):
        make(batch_size=35)


@pytest.mark.parametrize(
    ("arguments", "error", "problem"),
    [
        ({"collectors": {"ahead": 2}}, ArgumentError, "'ahead' for PPO"),
        ({"collectors": {"sync_every": 2}}, ArgumentError, "'sync_every'"),
        ({"rollout_buffer_class": CompressedReplayBuffer}, ConfigurationError, "CompressedRolloutBuffer.*not Comp"),
        ({"rollout_buffer_class": RolloutBuffer}, ConfigurationError, "not RolloutBuffer"),
        ({"env": VecNormalize(make_vec_env(Game)), "collectors": {"make_env": Game}}, ConfigurationError, "VecNorm"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        make(**arguments)


@pytest.mark.parametrize("algorithm", [RecurrentPPO, MaskablePPO])
def test_algorithms_that_collect_in_their_own_way_are_refused(algorithm: Any) -> None:
    with pytest.raises(ConfigurationError, match=algorithm.__name__):
        distributed(algorithm)
