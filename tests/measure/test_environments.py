from __future__ import annotations

import pytest

from sb3_extra_buffers.errors import EnvironmentMakeError
from sb3_extra_buffers.measure.environments import describe, make_env


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPol-v1", "There is no environment 'CartPol-v1': .* Did you mean: `CartPole`"),
        ("CartPole-v77", "There is no environment 'CartPole-v77'"),
        ("nowhere:Env-v0", "needs a package that is not installed: .*nowhere.* Install it with pip."),
        ("Blackjack-v1", "has observations of type Tuple, .* Wrap it"),
    ],
)
def test_an_environment_that_cannot_be_used_is_explained_in_one_line(env_id: str, message: str) -> None:
    with pytest.raises(EnvironmentMakeError, match=message) as caught:
        make_env(env_id, 1, seed=0)
    assert "\n" not in str(caught.value)


def test_atari_is_prepared_as_sb3_does_and_frames_are_stacked_as_asked() -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    assert describe(make_env("PongNoFrameskip-v4", 1, seed=0).observation_space) == "uint8 (4, 84, 84)"
    assert describe(make_env("PongNoFrameskip-v4", 1, seed=0, frame_stack=1).observation_space) == "uint8 (1, 84, 84)"
    assert describe(make_env("CartPole-v1", 2, seed=0, frame_stack=3).observation_space) == "float32 (12,)"
