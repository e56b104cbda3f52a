"""What happens rarely: an interrupted choice of the codec, spaces without elements or axes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.compressed import CompressedDictReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.storage import auto, observation_store
from tests.transitions import play

IMAGES = spaces.Box(0, 255, (1, 36, 36), np.uint8)
ACTIONS = spaces.Discrete(5)


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_a_codec_is_chosen_also_if_the_choice_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = CompressedReplayBuffer(100, IMAGES, ACTIONS, "cpu")
    n_interrupted = 0
    for number, step in enumerate(itertools.islice(play(IMAGES, action_space=ACTIONS), 150)):
        with monkeypatch.context() as patch:
            if number < 80:
                patch.setattr(observation_store, "detect_layout", interrupt)
                patch.setattr(auto, "Trials", interrupt)
            try:
                buffer.add(*step)
            except KeyboardInterrupt:
                n_interrupted += 1
    assert n_interrupted
    assert buffer.size() == 100
    assert "not enough seen yet" not in buffer.memory_usage().method


def test_a_key_without_elements_for_a_long_time() -> None:
    space = spaces.Dict({"empty": spaces.Box(0, 9, (0,)), "number": spaces.Box(0, 9, ())})
    buffer = CompressedDictReplayBuffer(700, space, ACTIONS, "cpu", n_envs=2)
    for step in range(600):
        numbers = np.arange(step, step + 4, dtype=np.float32)[::2]  # not contiguous
        obs = {"empty": np.zeros((2, 0), np.float32), "number": numbers}
        buffer.add(obs, obs, np.zeros((2, 1)), np.zeros(2), np.zeros(2), [{}, {}])
    assert buffer.observations["number"][300].tolist() == [300, 302]
    assert buffer.sample(5).observations["empty"].shape == (5, 0)
