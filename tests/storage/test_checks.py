"""``check()`` finds what contradicts something else, and says what it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.storage.observation_store import ObservationStore
from tests.methods import installed
from tests.transitions import play

IMAGES = spaces.Box(0, 255, (4, 12, 12), np.uint8)
ACTIONS = spaces.Discrete(5)


def filled(method: str) -> tuple[CompressedReplayBuffer, ObservationStore]:
    """A buffer that has been overwritten, with several records and references."""
    buffer = CompressedReplayBuffer(200, IMAGES, ACTIONS, "cpu", 2, compression_method=method, frame_stack=4)
    for step in itertools.islice(play(IMAGES, 2, action_space=ACTIONS), 250):
        buffer.add(*step)
    buffer.check()
    return buffer, buffer._stores[""]


def swap(array: np.ndarray, first: int, second: int) -> None:
    array[[first, second]] = array[[second, first]]


def live(store: ObservationStore, lane: int = 0) -> int:
    """The place in the index of the oldest record of a lane."""
    return int(store.frames.first_records[lane]) % store.frames.index.capacity


DAMAGES: dict[str, tuple[str, str, Callable[[ObservationStore], None]]] = {
    "a reference counted once too often": (
        "delta", "but it is used", lambda store: store.codec._uses.incref(store.codec._current[:1]),
    ),
    "a reference counted once too seldom": (
        "delta", "but it is used", lambda store: store.codec._uses.decref(store.codec._current[:1]),
    ),
    "a record with another reference": (
        "delta", "but it is used", lambda store: store.frames.index.references.__setitem__((0, live(store)), 0),
    ),
    "a dictionary that is gone": (
        "zstd-dict/3", "Dictionaries", lambda store: store.codec._dictionaries.pop(store.codec._current),
    ),
    "a record outside the arena": (
        "delta", "outside the live ranges",
        lambda store: store.frames.index.starts.__setitem__((0, live(store)), 1 << 40),
    ),
    "two records at the same place": (
        "delta", "overlap|lies before", lambda store: store.frames.index.starts.__setitem__(
            (1, live(store, 1)), store.frames.index.starts[0, live(store)]
        ),
    ),
    "records in another order": (
        "gzip1", "lies before|overlap", lambda store: swap(store.frames.index.starts[0], live(store), live(store) + 1),
    ),
    "a record that is too long": (
        "delta", "bytes, which no record",
        lambda store: store.frames.index.lengths.__setitem__((0, live(store)), 1 << 30),
    ),
    "more frames in records than arrived": (
        "delta", "contradict each other", lambda store: store.frames.encoded.__iadd__(1 << 20),
    ),
    "an observation whose frames are gone": (
        "delta", "slot 3, environment 1", lambda store: store.ends[0].__setitem__((3, 1), 4),
    ),
    "an observation whose frames never came": (
        "delta", "slot 3, environment 1", lambda store: store.ends[1].__setitem__((3, 1), 1 << 20),
    ),
    "another newest observation": (
        "delta", "newest observation", lambda store: store.frames.newest.memory.__setitem__((0, 5), 77),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named(name: str) -> None:
    method, message, damage = DAMAGES[name]
    if not installed(method):
        pytest.skip(f"{method} is not installed")
    buffer, store = filled(method)
    damage(store)
    with pytest.raises(CorruptDataError, match=message):
        buffer.check()


def test_a_reference_that_is_released_once_too_often_is_noticed_at_once() -> None:
    _, store = filled("delta")
    number = store.codec._current[:1]
    with pytest.raises(CorruptDataError, match="released more often than it was used"):
        store.codec.release(np.repeat(number, 1000))


def test_a_position_beyond_the_buffer() -> None:
    buffer, _ = filled("none")
    buffer.pos = 101
    with pytest.raises(CorruptDataError, match="position is 101"):
        buffer.check()
