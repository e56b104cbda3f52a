from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.errors import ConfigurationError, EnvironmentMakeError
from sb3_extra_buffers.measure.environments import describe, make_env


class Talking(gym.Env[Any, Any]):
    """Has text among its observations, as MiniGrid does."""

    action_space = spaces.Discrete(2)

    def __init__(self, size: int = 2) -> None:
        self.observation_space = spaces.Dict({"place": spaces.Box(0, 1, (size,)), "mission": spaces.Text(10)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return {"place": np.zeros(self.observation_space["place"].shape, np.float32), "mission": "go"}, {}


class WithoutMission(gym.ObservationWrapper[Any, Any, Any]):
    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = env.observation_space["place"]  # type: ignore[index]

    def observation(self, observation: Any) -> Any:
        return observation["place"]


class Failing(gym.Env[Any, Any]):
    """Raises an error in its third step, or has spaces that SB3 does not support."""

    def __init__(self, action_space: spaces.Space[Any], shape: tuple[int, ...] = (2,)) -> None:
        self.observation_space, self.action_space = spaces.Box(0, 1, shape), action_space
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("the simulator has gone")
        return np.zeros(2, np.float32), 0.0, False, False, {}


gym.register("Talking-v0", Talking)
gym.register("Failing-v0", Failing, kwargs={"action_space": spaces.Discrete(2)})
gym.register("Scalar-v0", Failing, kwargs={"action_space": spaces.Discrete(2), "shape": ()})
gym.register("Rows-v0", Failing, kwargs={"action_space": spaces.MultiBinary([2, 3])})
gym.register("DictActions-v0", Failing, kwargs={"action_space": spaces.Dict({"jump": spaces.Discrete(2)})})


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPol-v1", "There is no environment 'CartPol-v1': .* Did you mean: `CartPole`"),
        ("CartPole-v77", "There is no environment 'CartPole-v77'.*add the module: --env module:CartPole-v77"),
        ("tests-Nothing-v0", "There is no environment .*: --env tests:tests-Nothing-v0$"),
        ("nowhere:Env-v0", "needs a package that is not installed: .*nowhere.* Install it with pip."),
        ("tests.measure.test_environments:DictActions-v0", "a type that SB3 does not support: Dict in .* Pass"),
        ("tests.measure.test_environments:Rows-v0", r"does not support: MultiBinary of shape \(2, 3\) in .* Pass"),
        ("tests.measure.test_environments:Scalar-v0", r"does not support: Box of shape \(\) in .* Pass"),
        ("Blackjack-v1", "a type that SB3 does not support: Tuple in .* Pass a wrapper"),
        ("tests.measure.test_environments:Talking-v0", r"keys that SB3 does not support: mission \(Text\)"),
    ],
)
def test_an_environment_that_cannot_be_used_is_explained_in_one_line(env_id: str, message: str) -> None:
    with pytest.raises(EnvironmentMakeError, match=message) as caught:
        make_env(env_id, 1, seed=0)
    assert "\n" not in str(caught.value)


def test_a_wrapper_and_arguments_of_the_environment() -> None:
    talking, wrapper = "tests.measure.test_environments:Talking-v0", "tests.measure.test_environments:WithoutMission"
    assert describe(make_env(talking, 1, seed=0, wrapper=wrapper).observation_space) == "float32 (2,)"
    env = make_env(talking, 1, seed=0, wrapper=wrapper, env_kwargs={"size": 5})
    assert describe(env.observation_space) == "float32 (5,)"
    with pytest.raises(ConfigurationError, match=r"There is no wrapper 'tests:Nothing'.* Pass 'module:Class'"):
        make_env(talking, 1, seed=0, wrapper="tests:Nothing")


def test_a_wrapper_takes_the_place_of_those_for_atari() -> None:
    pytest.importorskip("ale_py")
    env = make_env("ALE/Pong-v5", 1, seed=0, wrapper="gymnasium.wrappers:GrayscaleObservation")
    assert describe(env.observation_space) == "uint8 (210, 160)"


def test_atari_is_prepared_as_sb3_does_and_frames_are_stacked_as_asked() -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    assert describe(make_env("PongNoFrameskip-v4", 1, seed=0).observation_space) == "uint8 (4, 84, 84)"
    assert describe(make_env("PongNoFrameskip-v4", 1, seed=0, frame_stack=1).observation_space) == "uint8 (1, 84, 84)"
    assert describe(make_env("CartPole-v1", 2, seed=0, frame_stack=3).observation_space) == "float32 (12,)"
