"""Recordings: what was played comes back as SB3 would store it."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.env_util import make_vec_env

from benchmarks import recorder, recordings
from benchmarks.environments import ENVIRONMENTS, WORKLOADS, Environment
from benchmarks.playback import play_back
from benchmarks.recorder import StickyPolicy
from benchmarks.recordings import load_recording, longest_recording, transitions


class GoalEnv(gym.Env[dict[str, np.ndarray], np.ndarray]):
    """Goals and continuous actions, in episodes of seven steps that a time limit ends."""

    observation_space = gym.spaces.Dict(
        {
            "achieved_goal": gym.spaces.Box(-np.inf, np.inf, (2,), np.float64),
            "observation": gym.spaces.Box(-np.inf, np.inf, (5,), np.float64),
        }
    )
    action_space = gym.spaces.Box(-2, 2, (3,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._obs(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.steps += 1
        return self._obs(), float(action[0]), False, self.steps == 7, {}

    def _obs(self):
        return {"achieved_goal": self.np_random.normal(size=2), "observation": self.np_random.normal(size=5)}


@pytest.fixture
def goals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> recordings.Recording:
    for module in (recordings, recorder):
        monkeypatch.setattr(module, "CACHE", tmp_path)
    environment = Environment(lambda n_envs, seed: make_vec_env(GoalEnv, n_envs, seed), "vector", "for the test")
    monkeypatch.setitem(ENVIRONMENTS, "goals", environment)
    return load_recording("goals", 30, 2)


def test_dicts_and_continuous_actions_come_back_as_they_were_played(goals: recordings.Recording) -> None:
    assert goals.observation_space == GoalEnv.observation_space
    assert goals.action_space == gym.spaces.Box(-1, 1, (3,), np.float32)
    recorder.check(goals, 30)


def test_a_check_finds_a_value_that_differs(goals: recordings.Recording) -> None:
    goals.rewards[17, 1] += 1
    with pytest.raises(AssertionError, match="reward of step 17"):
        recorder.check(goals, 30)


def test_actions_are_scaled_as_off_policy_algorithms_store_them(goals: recordings.Recording) -> None:
    assert np.abs(goals.actions).max() <= 1
    # The reward is the first action as it was played.
    assert np.allclose(goals.rewards, 2 * goals.actions[..., 0])


def test_dicts_can_be_played_for_more_environments(goals: recordings.Recording) -> None:
    before = None
    for step in play_back(goals, 50, 5):
        assert step.obs["observation"].shape == (5, 5)
        if before is not None:
            going_on = ~before.done
            for key, values in step.obs.items():
                assert np.array_equal(values[going_on], before.next_obs[key][going_on])
        before = step


def test_a_recording_in_the_cache_is_not_played_again(
    goals: recordings.Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "record", None)
    shorter = load_recording("goals", 20, 2)
    assert shorter.path == goals.path
    assert len(list(transitions(shorter))) == 20
    assert longest_recording("goals", 2) == 30
    assert longest_recording("goals", 3) == 0


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown recording 'mspackman'; the known ones are mspacman, "):
        load_recording("mspackman", 10)


def test_a_sticky_policy_repeats_actions_as_often_as_asked() -> None:
    policy = StickyPolicy(gym.spaces.Discrete(1000), 50, seed=0, repeat=0.75)
    actions = np.array([policy.predict(None)[0] for _ in range(400)])
    assert np.mean(actions[1:] == actions[:-1]) == pytest.approx(0.75, abs=0.02)


def test_a_sticky_policy_chooses_by_weight_and_repeats_whole_vectors() -> None:
    policy = StickyPolicy(gym.spaces.Discrete(3), 50, seed=0, repeat=0.5, weights=(3, 1, 0))
    actions = np.array([policy.predict(None)[0] for _ in range(400)])
    assert np.bincount(actions.ravel(), minlength=3) / actions.size == pytest.approx([0.75, 0.25, 0], abs=0.02)

    policy = StickyPolicy(gym.spaces.Box(-1, 1, (4,), np.float32), 3, seed=0, repeat=0.5)
    vectors = np.array([policy.predict(None)[0] for _ in range(100)])
    assert vectors.dtype == np.float32
    changed = np.any(vectors[1:] != vectors[:-1], axis=-1)
    assert np.array_equal(changed, np.all(vectors[1:] != vectors[:-1], axis=-1))
    assert changed.mean() == pytest.approx(0.5, abs=0.1)


def test_workloads_are_environments_and_each_says_why_it_is_there() -> None:
    assert {group: len(names) for group, names in WORKLOADS.items()} == {"atari": 12, "rgb": 5, "vectors": 6}
    for names in WORKLOADS.values():
        assert all(ENVIRONMENTS[name].why for name in names)
