"""What ``model.save_replay_buffer()`` of an earlier version pickled can be loaded, used and saved again."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.methods import installed
from tests.persistence.buffers import SLOTS, add, draw, steps_for
from tests.transitions import assert_same

FOLDER = Path(__file__).with_name("pickles")  # written by version 1.0.0.dev0
NAMES = ["replay", "rollout", *(["dict-replay"] if installed("zstd-dict") else [])]


def flat(batch: Any) -> dict[str, np.ndarray]:
    parts = {number: part if isinstance(part, dict) else {"": part} for number, part in enumerate(batch)}
    return {
        f"{number}.{key}": np.asarray(value)
        for number, part in parts.items()
        for key, value in part.items()
        if value is not None
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_pickle_that_was_kept(name: str) -> None:
    buffer = pickle.loads((FOLDER / f"{name}.pkl").read_bytes())
    buffer.check()
    again = pickle.loads(pickle.dumps(buffer))
    found = flat(draw(buffer, 7))
    with np.load(FOLDER / f"{name}.npz") as expected:
        assert set(found) == set(expected.files)
        for key in expected.files:
            assert_same(found[key], expected[key])
    again.check()
    if name == "rollout":
        again.reset()
    for number, step in enumerate(steps_for(again, SLOTS)):
        add(again, step, number)
        again.check()


def test_two_observations_in_which_all_is_new_find_room_in_a_buffer_of_an_earlier_version() -> None:
    buffer = pickle.loads((FOLDER / "replay.pkl").read_bytes())
    space, rng = buffer.observation_space, np.random.default_rng(0)
    images = rng.integers(0, 256, (60, 2, buffer.n_envs, *space.shape)).astype(space.dtype)
    zeros = np.zeros(buffer.n_envs)
    for step, (image, following) in enumerate(images):
        slot = buffer.pos
        buffer.add(image, following, np.zeros((buffer.n_envs, buffer.action_dim)), zeros, zeros, [{}] * buffer.n_envs)
        assert_same(buffer.observations[slot], image)
        assert_same(buffer.next_observations[slot], following)
        if step % 10 == 0:
            buffer.check()
    n_slots = min(len(images), buffer.buffer_size)
    for age in range(1, n_slots + 1):
        assert_same(buffer.observations[(buffer.pos - age) % buffer.buffer_size], images[-age, 0])
