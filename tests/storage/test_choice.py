"""``auto``: what it chooses, when it looks again, and that a change of mind loses nothing."""

from __future__ import annotations

import logging
from itertools import pairwise

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.storage import observation_store
from sb3_extra_buffers.storage.choice import choose_codec
from sb3_extra_buffers.storage.config import StorageConfig
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.stacking import StackLayout

AUTO = StorageConfig.from_arguments("auto", None, None, None, "auto")
IMAGE = (1, 60, 60)


def scene(rng: np.random.Generator, steps: int, n_envs: int = 1) -> np.ndarray:
    """A background in front of which some pixels change."""
    images = np.repeat(rng.integers(0, 256, (1, n_envs, *IMAGE), dtype=np.uint8), steps, axis=0)
    for step in images.reshape(steps, -1):
        step[rng.integers(0, step.size, 20)] = rng.integers(0, 256, 20)
    return images


def store_of(n_slots: int, dtype: type = np.uint8, shape: tuple[int, ...] = IMAGE) -> ObservationStore:
    return ObservationStore(n_slots, 1, shape, np.dtype(dtype), AUTO)


def test_images_in_which_little_changes_are_compressed() -> None:
    layout = StackLayout(IMAGE, np.dtype(np.uint8))
    preference = choose_codec(layout, scene(np.random.default_rng(0), 64))
    assert preference.recipe.method.name != "none"
    assert preference.frame_bytes < 0.2 * layout.frame.nbytes


def test_noise_ends_up_uncompressed() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 1, *IMAGE), dtype=np.uint8)
    assert choose_codec(StackLayout(IMAGE, np.dtype(np.uint8)), noise).recipe.method.name == "none"


def test_vectors_end_up_uncompressed() -> None:
    vectors = np.zeros((64, 1, 17), dtype=np.float32)
    assert choose_codec(StackLayout((17,), np.dtype(np.float32)), vectors).recipe.method.name == "none"


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


@pytest.fixture
def early_reviews(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation_store, "REVIEW_STEPS", 100)
    monkeypatch.setattr(observation_store, "_RECHECK_STEP", 0)
    monkeypatch.setattr(observation_store, "_RECHECK_STEPS", 64)


@pytest.mark.usefixtures("early_reviews")
def test_data_that_changes_a_lot_is_looked_at_again_and_nothing_is_lost() -> None:
    rng = np.random.default_rng(0)
    calm, noise = scene(rng, 300), rng.integers(0, 256, (300, 1, *IMAGE), dtype=np.uint8)
    store, images = store_of(700), np.concatenate([calm, noise])
    for slot, image in enumerate(images):
        store.write(0, slot, store.checked(image))
        if slot == 299:
            assert store.codec.name != "none"
    assert store.codec.name == "none"
    (found,) = store.read([(0, np.arange(600))], np.zeros(600, dtype=np.int64))
    np.testing.assert_array_equal(found, images[:, 0])


def test_frame_numbers_start_anew_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation_store, "REVIEW_STEPS", 10)
    monkeypatch.setattr(observation_store, "_LAST_FRAME_NUMBER", 200)
    store = ObservationStore(
        50, 1, IMAGE, np.dtype(np.uint8), StorageConfig.from_arguments("delta", None, None, None, None)
    )
    images = scene(np.random.default_rng(0), 500)
    for step, image in enumerate(images):
        store.write(0, step % 50, store.checked(image))
    assert store.frames.heads.max() <= 211
    (found,) = store.read([(0, np.arange(50))], np.zeros(50, dtype=np.int64))
    np.testing.assert_array_equal(found, images[450:, 0])


@pytest.mark.parametrize("shape", [(3, 40, 40), (40, 40, 3), (12, 20, 20)])
def test_indexed_colour_can_be_asked_for_and_is_exact(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    config = StorageConfig.from_arguments("gzip/1", None, {"indexed_colour": True}, None, "auto")
    store = ObservationStore(100, 1, shape, np.dtype(np.uint8), config)
    palette = rng.integers(0, 256, 5, dtype=np.uint8)
    images = palette[rng.integers(0, 5, (120, *shape))]
    if shape[0] == 12:  # a stack of four images
        frames = palette[rng.integers(0, 5, (123, 3, 20, 20))]
        images = np.stack([frames[t : t + 4].reshape(shape) for t in range(120)])
    for step, image in enumerate(images):
        store.write(0, step % 100, store.checked(image[None]))
    assert store.codec.label == "gzip1, indexed colour"
    (found,) = store.read([(0, np.arange(20, 100))], np.zeros(80, dtype=np.int64))
    np.testing.assert_array_equal(found, images[20:100])


def test_indexed_colour_is_left_out_with_a_warning_where_there_is_none() -> None:
    config = StorageConfig.from_arguments("gzip/1", None, {"indexed_colour": True}, None, "auto")
    store = ObservationStore(100, 1, (6, 10, 10), np.dtype(np.uint8), config)
    images = np.random.default_rng(0).integers(0, 256, (70, 6, 10, 10), dtype=np.uint8)
    for slot, image in enumerate(images[:63]):
        store.write(0, slot, store.checked(image[None]))
    with pytest.warns(UserWarning, match="are not RGB, so they are stored without indexed_colour"):
        store.write(0, 63, store.checked(images[63][None]))
    for slot, image in enumerate(images[64:], 64):
        store.write(0, slot, store.checked(image[None]))
    (found,) = store.read([(0, np.arange(70))], np.zeros(70, dtype=np.int64))
    np.testing.assert_array_equal(found, images)
