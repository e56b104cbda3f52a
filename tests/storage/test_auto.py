"""``auto`` over the life of a buffer: when it tries codecs, and that a change of mind loses nothing."""

from __future__ import annotations

import logging
import pickle
from itertools import pairwise

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.storage import auto, choice, observation_store, reading_time
from sb3_extra_buffers.storage.choice import PlannedTrials
from sb3_extra_buffers.storage.config import StorageConfig
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.pickling import unpickled
from tests.storage.helpers import AUTO, IMAGE, scene, store_of

DELTA = StorageConfig.from_arguments("delta", None, None, None, "auto")


def test_the_choice_is_logged_once_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    space = spaces.Box(0, 255, IMAGE, np.uint8)
    buffer = CompressedReplayBuffer(100, space, spaces.Discrete(2), "cpu")
    images = scene(np.random.default_rng(0), 91)
    with caplog.at_level(logging.INFO, "sb3_extra_buffers"):
        assert "not enough seen yet" in buffer.memory_usage().method
        for image, following in pairwise(images):
            buffer.add(image, following, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
    chosen = buffer.memory_usage().method
    assert chosen.endswith("(auto)")
    assert [record.message.split(",")[0] + " (auto)" for record in caplog.records] == [chosen]


def test_trials_that_are_not_complete_begin_again_in_a_loaded_buffer() -> None:
    rng = np.random.default_rng(0)
    store = store_of(700)
    for slot in range(390):  # the second trials begin at step 384
        store.write(0, slot, store.checked(scene(rng, 1)[0]))
        if store._auto.is_trying and slot > 380:
            loaded = pickle.loads(pickle.dumps(store))  # right after they began, and a few steps later
            assert not loaded._auto.is_trying
            loaded.write(0, slot + 1, store.checked(scene(rng, 1)[0]))
            assert loaded._auto.is_trying
    assert store._auto.is_trying


def test_a_fixed_method_stays_in_a_store_that_loads_the_state_of_auto() -> None:
    rng = np.random.default_rng(0)
    automatic, fixed = store_of(300), ObservationStore(300, 1, IMAGE, np.dtype(np.uint8), DELTA)
    for slot in range(50):
        automatic.write(0, slot, automatic.checked(rng.integers(0, 256, (1, *IMAGE), dtype=np.uint8)))
    fixed.restore(unpickled(automatic.state()))
    for slot in range(50, 300):
        fixed.write(0, slot, fixed.checked(rng.integers(0, 256, (1, *IMAGE), dtype=np.uint8)))
        assert not fixed._auto.is_trying


@pytest.mark.parametrize(("n_slots", "fits"), [(100, False), (200, False), (600, False), (1700, False), (2150, True)])
def test_a_buffer_that_is_filled_once_does_not_keep_the_memory_of_a_trial(n_slots: int, fits: bool) -> None:
    store, rng = store_of(n_slots, shape=(1, 30, 30)), np.random.default_rng(0)
    noise = rng.integers(0, 256, (64, 1, 1, 30, 30), dtype=np.uint8)

    def write(steps: range) -> int:
        n_trying = 0
        for step in steps:
            store.write(0, step % n_slots, store.checked(noise[rng.integers(64)] ^ np.uint8(step & 255)))
            n_trying += store._auto.is_trying
        return n_trying

    write(range(n_slots))
    assert not store._auto.is_trying
    assert fits == (write(range(n_slots, n_slots + 2)) == 0)  # a trial that did not fit begins once it is full
    n_left = store.steps_until_settled
    write(range(n_slots + 2, n_slots + 2 + n_left))
    assert not store._auto.is_trying
    assert store.steps_until_settled == 0


def test_a_review_right_after_a_choice_does_not_judge_it_by_a_few_frames() -> None:
    store, rng = store_of(700), np.random.default_rng(0)
    for slot, image in enumerate(scene(rng, 100)):
        store.write(0, slot, store.checked(image))
    store._auto._usual_frame_bytes = 1e6
    store.frames.restart_mean()
    for slot in range(100, 130):
        store.write(0, slot, store.checked(scene(rng, 1)[0]))
    store._review()
    assert not store._auto.is_trying
    assert store._auto._usual_frame_bytes == 1e6


@pytest.fixture
def early_reviews(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation_store, "REVIEW_STEPS", 100)
    monkeypatch.setattr(choice, "_FEWEST_STEPS", 64)
    monkeypatch.setattr(choice, "_MOST_STEPS", 64)


@pytest.mark.usefixtures("early_reviews")
def test_data_that_changes_a_lot_is_looked_at_again_and_nothing_is_lost() -> None:
    rng = np.random.default_rng(0)
    calm, noise = scene(rng, 300), rng.integers(0, 256, (400, 1, *IMAGE), dtype=np.uint8)
    store, images = store_of(700), np.concatenate([calm, noise])
    for slot, image in enumerate(images):
        store.write(0, slot, store.checked(image))
        if slot == 299:
            assert store.codec.name != "none"
    assert store.codec.name == "none"
    (found,) = store.read([(0, np.arange(700))], np.zeros(700, dtype=np.int64))
    np.testing.assert_array_equal(found, images[:, 0])


@pytest.mark.usefixtures("early_reviews")
def test_a_store_says_how_many_steps_it_takes_until_its_codec_is_settled() -> None:
    rng, store, promised = np.random.default_rng(0), store_of(2_000), []
    while store.steps_until_settled:
        promised.append(store._steps + store.steps_until_settled)
        assert store._steps < promised[0]
        store.write(0, store._steps, rng.integers(0, 256, (1, *IMAGE), dtype=np.uint8))
    assert not store._auto.is_trying
    assert store._auto._n_done == len(choice.TRIALS)
    assert promised[0] - reading_time.reading_steps(9) <= store._steps <= min(promised[100:])


def test_a_given_method_and_small_frames_are_settled_at_once() -> None:
    given = StorageConfig.from_arguments("delta", None, None, None, "auto")
    assert ObservationStore(100, 1, IMAGE, np.dtype(np.uint8), given).steps_until_settled == 0
    assert store_of(100, np.float32, (17,)).steps_until_settled == 0


@pytest.mark.usefixtures("early_reviews")
def test_frames_that_slowly_become_larger_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compared with those that the codec was chosen for, not with those of the review before."""
    monkeypatch.setattr(auto, "TRIALS", [PlannedTrials(1 << 40, 0, 1 / 100)])
    rng = np.random.default_rng(0)
    store = ObservationStore(900, 1, IMAGE, np.dtype(np.uint8), AUTO)
    image = rng.integers(0, 256, (1, *IMAGE), dtype=np.uint8)
    tried = []
    for slot in range(900):
        image = image.copy()
        places = rng.integers(0, image.size, 200 + slot // 2)  # at most a quarter more from review to review
        image.reshape(-1)[places] = rng.integers(0, 256, len(places))
        store.write(0, slot, store.checked(image))
        tried.append(store._auto.is_trying)
    assert not any(tried[:200])
    assert any(tried)


@pytest.mark.parametrize(("n_changes", "frames_per_record"), [(5, 16), (60, 8)])
def test_for_memory_small_frames_get_long_records(n_changes: int, frames_per_record: int) -> None:
    rng = np.random.default_rng(0)
    config = StorageConfig.from_arguments("auto", None, None, None, "auto", "memory")
    store = ObservationStore(600, 1, IMAGE, np.dtype(np.uint8), config)
    images = np.repeat(rng.integers(0, 256, (1, 1, *IMAGE), dtype=np.uint8), 500, axis=0)
    for slot, image in enumerate(images):
        image.reshape(-1)[rng.integers(0, image.size, n_changes)] = rng.integers(0, 256, n_changes)
        store.write(0, slot, store.checked(image))
    assert (store.codec.name, store.codec.frames_per_record) == ("delta-zstd", frames_per_record)
    assert "nothing else was tried" in store.choice
    (found,) = store.read([(0, np.arange(500))], np.zeros(500, dtype=np.int64))
    assert np.array_equal(found, images[:, 0])
    store.check()
