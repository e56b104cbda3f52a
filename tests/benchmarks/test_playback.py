"""Recordings that are played for longer, and for more environments, than they were recorded for."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.playback import play_back
from benchmarks.recordings import load_recording, transitions

RECORDED = load_recording("noise", 40, 4)


def test_what_was_recorded_is_played_as_it_is() -> None:
    for played, recorded in zip(play_back(RECORDED, 39, 4), transitions(RECORDED), strict=False):
        assert np.array_equal(played.obs, recorded.obs)
        assert np.array_equal(played.next_obs, recorded.next_obs)
        assert np.array_equal(played.done, recorded.done)


@pytest.mark.parametrize("n_envs", [1, 3, 4, 8, 16])
def test_episodes_stay_whole(n_envs: int) -> None:
    before = None
    steps = list(play_back(RECORDED, 100, n_envs))
    assert len(steps) == 100
    for step in steps:
        assert step.obs.shape == (n_envs, 4, 84, 84)
        assert len(step.infos) == n_envs
        if before is not None:
            going_on = ~before.done
            assert np.array_equal(step.obs[going_on], before.next_obs[going_on])
        before = step


def test_memory_has_the_channels_last_as_in_training() -> None:
    for n_envs in (4, 8):
        for step in play_back(RECORDED, 50, n_envs):
            assert step.obs.transpose(0, 2, 3, 1).flags.c_contiguous


def test_after_a_lap_environments_change_places() -> None:
    steps = list(play_back(RECORDED, 41, 4))
    assert steps[39].done.all()
    assert [info["TimeLimit.truncated"] for info in steps[39].infos] == [True] * 4
    assert np.array_equal(steps[40].obs, np.roll(steps[0].obs, -1, axis=0))


def test_more_environments_begin_at_different_places() -> None:
    first = next(play_back(RECORDED, 1, 8))
    assert not np.array_equal(first.obs[:4], first.obs[4:])
