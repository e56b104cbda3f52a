"""What ``model.save_replay_buffer()`` of an earlier version pickled can be loaded, used and saved again."""

from __future__ import annotations

import copy
import pickle
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.compressed import BaseCompressedBuffer, CompressedReplayBuffer
from sb3_extra_buffers.storage.pickling import Pickled
from tests.methods import installed
from tests.persistence.buffers import ACTIONS, ALL_CLASSES, IMAGES, N_ENVS, SLOTS, add, draw, make, steps_for
from tests.transitions import assert_same

FOLDER = Path(__file__).with_name("pickles")  # written by version 1.0.0.dev0
NAMES = ["replay", "rollout", *(["dict-replay"] if installed("zstd-dict") else [])]

needs_numpy_2_names = pytest.mark.skipif(
    not find_spec("numpy._core"), reason="NumPy 2 wrote these pickles, in modules that this NumPy lacks"
)


def flat(batch: Any) -> dict[str, np.ndarray]:
    parts = {number: part if isinstance(part, dict) else {"": part} for number, part in enumerate(batch)}
    return {
        f"{number}.{key}": np.asarray(value)
        for number, part in parts.items()
        for key, value in part.items()
        if value is not None
    }


@needs_numpy_2_names
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


@needs_numpy_2_names
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


class Counting(CompressedReplayBuffer):
    """A user's class with other arguments and attributes of its own."""

    def __init__(self, *args: Any, start: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = start
        self._history = [start]

    def add(self, *args: Any) -> None:
        super().add(*args)
        self.count += 1
        self._history.append(self.count)


COPIES = {
    "pickle": lambda buffer: pickle.loads(pickle.dumps(buffer)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("way", COPIES)
def test_attributes_and_classes_of_users(way: str) -> None:
    buffer: Any = Counting(SLOTS * N_ENVS, IMAGES, ACTIONS, "cpu", n_envs=N_ENVS, start=5)
    for transition in steps_for(buffer, 7):
        buffer.add(*transition)
    buffer.note = {"of": "the user"}
    other = COPIES[way](buffer)
    assert type(other) is Counting
    assert (other.count, other._history, other.note) == (12, buffer._history, buffer.note)
    assert other._history is not buffer._history
    assert_same(draw(other, 1), draw(buffer, 1))
    other.add(*steps_for(buffer, 1)[0])
    assert (other.size(), buffer.size()) == (8, 7)
    other.check()
    buffer.check()


@pytest.mark.parametrize("name", ALL_CLASSES)
def test_a_pickle_holds_nothing_but_arguments_state_and_plain_attributes(name: str) -> None:
    """Whatever a class creates is left out of the attributes, or it would be in the pickle twice."""
    buffer = make(name)
    for number, transition in enumerate(steps_for(buffer, SLOTS)):
        add(buffer, transition, number)
    for attribute, value in buffer.__getstate__().items():
        module = type(value).__module__
        assert not module.startswith("sb3_extra_buffers") or type(value) is Pickled, attribute
        assert not isinstance(value, np.ndarray), attribute


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_no_other_thread_can_add_while_a_buffer_is_pickled(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make("CompressedReplayBuffer")
    transitions = steps_for(buffer, 10)
    for transition in transitions[:5]:
        buffer.add(*transition)
    adding = threading.Thread(target=lambda: buffer.add(*transitions[5]))
    state = buffer._state

    def late() -> Any:
        found = state()
        adding.start()
        adding.join(timeout=0.2)
        assert buffer.pos == 5
        return found

    monkeypatch.setattr(CompressedReplayBuffer, "_state", lambda self: late())
    other = COPIES[way](buffer)
    adding.join()
    assert (other.pos, buffer.pos) == (5, 6)


class Thing:
    """Only pickle can save it."""

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.mark.parametrize("way", COPIES)
def test_infos_of_her_may_hold_anything(way: str) -> None:
    buffer: Any = make("CompressedHerReplayBuffer", copy_info_dict=True)
    for number, transition in enumerate(steps_for(buffer, 10)):
        buffer.add(*transition[:5], [{"thing": Thing(number)}, {}])
    other = COPIES[way](buffer)
    assert [info["thing"].value for info in other.infos[:10, 0]] == list(range(10))
    assert other.env is None
    other.set_env(buffer.env)
    assert_same(draw(other, 1), draw(buffer, 1))


class FromTheBase(BaseCompressedBuffer, ReplayBuffer):
    """A user's class that is none of this library's classes."""


def test_a_class_of_a_user_that_is_derived_from_the_base_class() -> None:
    buffer = FromTheBase(8, IMAGES, ACTIONS, device="cpu", compression_method="rle")
    assert type(pickle.loads(pickle.dumps(buffer))) is FromTheBase


def test_an_error_while_pickling_gives_the_lock_back() -> None:
    buffer: Any = make("CompressedPrioritizedReplayBuffer")
    buffer.note = lambda: None
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(buffer)
    adding = threading.Thread(target=lambda: buffer.add(*steps_for(buffer, 1)[0]))
    adding.start()
    adding.join()
    assert buffer.pos == 1


def test_a_pickle_leaves_out_dead_bytes() -> None:
    buffer = make("CompressedRolloutBuffer", compression_method="none", frame_stack=None)
    for number, transition in enumerate(steps_for(buffer, SLOTS)):
        add(buffer, transition, number)
    full = len(pickle.dumps(buffer))
    buffer.reset()
    assert len(pickle.dumps(buffer)) < full / 2
