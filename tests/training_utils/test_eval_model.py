"""What ``eval_model`` returns and prints."""

from __future__ import annotations

import importlib
import itertools
import pickle
from typing import Any

import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor, VecNormalize

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.training_utils.eval_model import Evaluation, eval_model
from tests.environments import SpaceEnv
from tests.training_utils.scripts import Scripted
from tests.training_utils.test_collection import IMAGES, VECTORS, breakout, made

N_EPISODES = 7


@pytest.fixture(scope="module")
def model() -> PPO:
    return PPO("MlpPolicy", made(VECTORS), seed=0, device="cpu")


def closed(env: VecEnv) -> list[bool]:
    """Becomes non-empty when ``env`` is closed."""
    calls: list[bool] = []
    env.close = lambda: calls.append(True)  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("n_envs", [1, 3, 10])
def test_episodes_are_those_of_sb3(model: PPO, n_envs: int) -> None:
    expected, _ = evaluate_policy(model, made(VECTORS, n_envs), N_EPISODES, return_episode_rewards=True)
    returns, seconds = eval_model(N_EPISODES, made(VECTORS, n_envs), model, progress=False)
    assert returns == expected
    assert seconds == []


@pytest.mark.parametrize("wrap", [VecMonitor, lambda env: env, lambda env: VecNormalize(env, training=False)])
def test_episodes_without_a_monitor(model: PPO, wrap: Any) -> None:
    lengths = itertools.cycle([20, 9])
    env = wrap(DummyVecEnv([lambda: SpaceEnv(IMAGES, length=next(lengths)) for _ in range(2)]))
    env.seed(0)

    class StandStill:
        def predict(self, observation: Any, *args: Any, **kwargs: Any) -> Any:
            return [0, 0], None

    # Rewards are 1, 2, 0, 1, ... and episodes have 13 or 9 steps.
    assert eval_model(4, env, StandStill(), progress=False).returns == pytest.approx([9, 13, 9, 13])


def test_the_environment_is_closed_unless_it_is_to_stay_open(model: PPO) -> None:
    env = made(VECTORS)
    calls = closed(env)
    eval_model(1, env, model, close_env=False, progress=False)
    assert not calls
    eval_model(1, env, model, progress=False)
    assert calls == [True]


def test_the_environment_is_closed_after_an_error(model: PPO) -> None:
    env = made(VECTORS)
    calls = closed(env)
    with pytest.raises(ConfigurationError, match="cannot be filled"):
        eval_model(1, env, model, buffer=[1])  # type: ignore[list-item]
    assert calls == [True]
    with pytest.raises(ConfigurationError, match="at least 1"):
        eval_model(0, env, model)


@pytest.mark.parametrize("framestack", [1, 4])
def test_several_buffers_of_a_real_game(framestack: int) -> None:
    env = breakout(framestack=framestack)
    methods = ("none", "auto", "delta")
    buffers = [
        CompressedReplayBuffer(500, env.observation_space, env.action_space, "cpu", n_envs, compression_method=method)
        for method, n_envs in zip(methods, (2, 2, 1), strict=True)
    ]
    returns, seconds = eval_model(1, env, Scripted(env), buffer=iter(buffers), progress=False)
    assert len(returns) == 1
    assert len(seconds) == 3
    assert all(second > 0 for second in seconds)
    assert len({buffer.pos for buffer in buffers}) == 1
    for other in buffers[1:]:
        assert (other.observations[:50, 0] == buffers[0].observations[:50, 0]).all()


def test_progress_is_shown_with_its_rate(model: PPO, capsys: pytest.CaptureFixture[str]) -> None:
    eval_model(2, made(VECTORS), model)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "episode/s" in shown
    assert "mean=" in shown


def test_the_summary() -> None:
    evaluation = Evaluation([10.0, 20.0, 30.0, 40.0, 60.0], [0.25, 1.5])
    assert str(evaluation) == (
        "5 episodes, mean return 32.0 ± 17.20\n"
        "Q1: 20 | median: 30 | Q3: 40 | relative IQR: 0.67 | min: 10 | max: 60\n"
        "seconds in add: 0.250 | 1.500"
    )
    returns, seconds = evaluation
    assert (returns, seconds) == ([10.0, 20.0, 30.0, 40.0, 60.0], [0.25, 1.5])
    assert pickle.loads(pickle.dumps(evaluation)) == evaluation


def test_the_summary_of_nothing() -> None:
    assert str(Evaluation([], [])) == "No episode ended"
    zero = Evaluation([0.0], [])
    assert str(zero).startswith("1 episode, mean return 0.0 ± 0.00\n")
    assert "relative IQR: - |" in str(zero)


@pytest.mark.parametrize(
    ("module", "name"), [("atari", "make_env"), ("eval_model", "eval_model"), ("buffer_warmup", "warm_up")]
)
def test_modules_are_found_where_the_older_library_has_them(module: str, name: str) -> None:
    package = importlib.import_module("sb3_extra_buffers.training_utils")
    imported = importlib.import_module(f"sb3_extra_buffers.training_utils.{module}")
    assert getattr(package, module) is imported  # and not a function of the same name
    assert callable(getattr(imported, name))
