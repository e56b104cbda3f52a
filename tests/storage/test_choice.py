"""``auto``: what it chooses, when it looks again, and that a change of mind loses nothing."""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.storage import auto, choice, observation_store, reading_time
from sb3_extra_buffers.storage.choice import PlannedTrials, Trial, Trials
from sb3_extra_buffers.storage.config import CodecRecipe, StorageConfig
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.pickling import unpickled
from sb3_extra_buffers.storage.reading_time import ColdMemory, ReadingTime, Sb3Reader, StoreReader
from sb3_extra_buffers.storage.stacking import StackLayout

AUTO = StorageConfig.from_arguments("auto", None, None, None, "auto")
DELTA = StorageConfig.from_arguments("delta", None, None, None, "auto")
IMAGE = (1, 60, 60)


def scene(rng: np.random.Generator, steps: int, n_envs: int = 1) -> np.ndarray:
    """A background in front of which some pixels change."""
    images = np.repeat(rng.integers(0, 256, (1, n_envs, *IMAGE), dtype=np.uint8), steps, axis=0)
    for step in images.reshape(steps, -1):
        step[rng.integers(0, step.size, 20)] = rng.integers(0, 256, 20)
    return images


def store_of(n_slots: int, dtype: type = np.uint8, shape: tuple[int, ...] = IMAGE) -> ObservationStore:
    return ObservationStore(n_slots, 1, shape, np.dtype(dtype), AUTO)


def best_for(steps: np.ndarray, **kwargs: Any) -> Trial:
    """The best codec where SB3 is slow: how long it takes here depends on the machine."""
    trials = Trials(StackLayout(steps.shape[2:], steps.dtype), steps.shape[1], len(steps), **kwargs)
    for step in steps:
        assert not trials.is_complete
        trials.add(step)
    while not trials.is_complete:
        trials.add(steps[-1])
    trials._sb3 = SimpleNamespace(microseconds=1e6)  # type: ignore[assignment]
    return trials.best()


def test_images_in_which_little_changes_are_compressed() -> None:
    best = best_for(scene(np.random.default_rng(0), 64))
    assert best.recipe.method.name != "none"
    assert best.frame_bytes < 0.2 * best.raw_bytes


def test_noise_ends_up_uncompressed() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 1, *IMAGE), dtype=np.uint8)
    assert best_for(noise).recipe.method.name == "none"


@pytest.mark.parametrize("size", [128, 300])
def test_large_images_are_measured_as_well_as_small_ones(size: int) -> None:
    """What a byte takes to copy does not depend on how many images are read at once."""
    images = np.random.default_rng(0).integers(0, 256, (48, 1, 3, size, size), dtype=np.uint8)
    trials = Trials(StackLayout(images.shape[2:], images.dtype), 1, len(images))
    while not trials.is_complete:
        trials.add(images[trials._step % len(images)])
    none = trials._results()[0]
    assert 0.5e-5 < none.reading / images[0].size < 1e-3  # microseconds


def test_no_step_of_a_trial_measures_for_long_and_its_memory_is_freed() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 1, *IMAGE), dtype=np.uint8)
    trials = Trials(StackLayout(IMAGE, noise.dtype), 1, 64)
    for step in noise:
        trials.add(step)
    n_calls = 0
    while not trials.is_complete:
        assert trials._cold is not None
        left = len(trials._unread)
        trials.add(noise[0])
        n_calls += 1
        assert len(trials._unread) >= left - 1
    assert n_calls == (1 + len(trials._candidates)) * reading_time._MEASUREMENTS + reading_time._PARTS
    assert not any(hasattr(candidate, "_store") for candidate in trials._candidates)
    trials.add(noise[0])  # as happens if Ctrl-C came right before the buffer took the result
    assert trials.best().recipe.method.name == "none"


def test_candidates_and_sb3_are_measured_in_turn() -> None:
    """So a machine that is busy for a moment does not decide against one of them."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 1, *IMAGE), dtype=np.uint8)
    trials = Trials(StackLayout(IMAGE, noise.dtype), 1, 64)
    for step in noise:
        trials.add(step)
    for turn in range(1, 4):
        for _ in range(1 + len(trials._candidates)):
            trials.add(noise[0])
        readings = [trials._sb3, *(candidate._reading for candidate in trials._candidates)]
        assert [len(reading._times) for reading in readings if reading] == [turn] * len(readings)


def test_what_a_reading_takes_grows_with_what_is_read() -> None:
    def microseconds(n_bytes: int) -> float:
        cold, reading = ColdMemory(n_bytes), ReadingTime(Sb3Reader())
        cold.grow(0.5)
        cold.grow(1.0)
        assert (cold.observations == 1).all()
        while not reading.is_complete:
            reading.measure(cold)
        return reading.microseconds

    assert microseconds(100_000) > 3 * microseconds(5_000)


def test_every_turn_reads_other_observations_if_there_are_enough() -> None:
    """A processor soon knows the branches of a decoder that reads the same again, and then it seems to be fast."""
    read: list[np.ndarray] = []
    store: Any = SimpleNamespace(
        codec=SimpleNamespace(frames_per_record=4),
        layout=SimpleNamespace(stack=4),
        gather=lambda lanes, firsts, outs: read.append(np.stack([lanes, firsts[0]])),
    )
    reader = StoreReader(store, np.arange(4), np.zeros(4, dtype=np.int64), np.full(4, 5000))
    cold = ColdMemory(4 * 7056)
    for turn in range(reading_time._MEASUREMENTS):
        reader(cold, cold.batch_size, turn)
    lanes, firsts = np.concatenate(read, axis=1)
    apart = 4 + 2 * 4  # then no frame is read twice either
    assert all(np.diff(np.sort(firsts[lanes == lane])).min() >= apart for lane in range(4))


def test_trials_of_large_frames_take_few_environments_and_those_of_small_ones_do_not_last_for_ever() -> None:
    def steps_and_lanes(shape: tuple[int, ...], **options: Any) -> tuple[int, int]:
        trials = Trials(StackLayout(shape, np.dtype(np.uint8)), 8, **options)
        return trials._n_steps, trials._n_lanes

    assert steps_and_lanes((1, 84, 84)) == (2 * (14 << 20) // (84 * 84 * 4) // 2 * 2, 4)
    assert steps_and_lanes((3, 512, 512)) == (2 * (14 << 20) // (3 * 512 * 512), 1)
    assert steps_and_lanes((3, 512, 512), n_steps=128) == steps_and_lanes((3, 512, 512))
    assert steps_and_lanes((3, 720, 1280)) == (32, 1)
    assert steps_and_lanes((1, 24, 24)) == (4096, 4)
    assert steps_and_lanes((1, 84, 84), most_steps=300) == (300, 4)


def test_memory_for_measurements_is_given_back_in_parts() -> None:
    cold = ColdMemory(5_000)
    cold.grow(1.0)
    parts = 1
    while not cold.shrink():
        parts += 1
    assert parts == reading_time._PARTS
    if sys.platform == "linux":  # where memory that was given back is zero
        assert cold.observations.mean() < 0.05


def test_small_frames_end_up_uncompressed() -> None:
    assert best_for(np.zeros((64, 1, 17), dtype=np.float32)).recipe.method.name == "none"


def result(method: str, frame_bytes: float, reading: float, storing: float = 10.0) -> Trial:
    return Trial(CodecRecipe(parse_method(method)), 7000, frame_bytes, storing, reading)


def chosen(prefer: Any, *results: Trial, current: str | None = None) -> str:
    trials = Trials(
        StackLayout(IMAGE, np.dtype(np.uint8)),
        1,
        8,
        prefer=prefer,
        current=current and CodecRecipe(parse_method(current)),
    )
    trials._candidates = [SimpleNamespace(result=lambda trial=trial: trial) for trial in results]  # type: ignore[misc]
    trials._sb3, trials._speedup = SimpleNamespace(microseconds=5.0), 1.0  # type: ignore[assignment]
    return trials.best().recipe.method.name


def test_a_codec_that_reads_slower_than_sb3_is_chosen_only_for_memory() -> None:
    raw, fast, small = result("none", 7000, 2.0), result("delta", 900, 1.0), result("zstd", 300, 9.0)
    assert chosen("balanced", raw, fast, small) == "delta"
    assert chosen("speed", raw, fast, small) == "delta"
    assert chosen("memory", raw, fast, small) == "zstd"
    assert chosen("balanced", raw, small) == "none"
    assert chosen("memory", raw, result("zstd", 300, 99.0)) == "none"


def test_a_preference_decides_between_codecs_that_are_fast_enough() -> None:
    raw, fast, small = result("none", 7000, 2.0), result("delta", 900, 0.5), result("zstd", 200, 3.0)
    assert chosen("speed", raw, fast, small) == "delta"
    assert chosen("memory", raw, fast, small) == "zstd"


def test_of_codecs_that_cost_about_the_same_the_one_that_reads_fastest_is_chosen() -> None:
    results = result("none", 7000, 2.0), result("delta", 800, 1.0), result("pixel-lz", 1100, 0.6)
    costs = [trial.cost("balanced") for trial in results[1:]]
    assert 1 < costs[1] / costs[0] < 1.15
    assert chosen("balanced", *results) == "pixel-lz"


def test_a_codec_that_saves_next_to_nothing_is_not_chosen() -> None:
    assert chosen("balanced", result("none", 7000, 2.0), result("delta", 6900, 0.1)) == "none"


def test_the_codec_in_use_stays_if_another_is_only_a_little_better() -> None:
    results = result("none", 7000, 2.0), result("delta", 900, 1.0), result("zstd", 800, 1.0)
    assert chosen("balanced", *results) == "zstd"
    assert chosen("balanced", *results, current="delta") == "delta"
    assert chosen("balanced", *results[:2], result("zstd", 400, 1.0), current="delta") == "zstd"


def test_the_codec_in_use_stays_if_it_is_measured_as_a_little_slower_than_sb3() -> None:
    """Measurements differ from time to time, and changing to and fro would leave observations of both in the buffer."""
    results = result("none", 7000, 2.0), result("bitpack", 3900, 2.0), result("delta", 900, 4.5)  # 4.35 are allowed
    assert chosen("balanced", *results) == "bitpack"
    assert chosen("balanced", *results, current="delta") == "delta"
    assert chosen("balanced", *results[:2], result("delta", 900, 4.7), current="delta") == "bitpack"
    both_slow = result("none", 7000, 2.0), result("bitpack", 800, 4.4), result("delta", 5000, 4.5)
    assert chosen("balanced", *both_slow) == chosen("balanced", *both_slow, current="delta") == "bitpack"


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


def test_a_lane_that_stands_still_does_not_keep_others_from_being_measured() -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (400, 2, *IMAGE), dtype=np.uint8)
    images[:, 1] = 0
    trials = Trials(StackLayout(IMAGE, images.dtype), 2, len(images))
    for step in images:
        trials.add(step)
    for _ in range(1 + len(trials._candidates)):
        trials.add(images[0])
    counts = [candidate._reading._read._counts.tolist() for candidate in trials._candidates if candidate._reading]
    assert all(moving > 150 and still == 1 for moving, still in counts)


def test_ctrl_c_in_the_middle_of_a_measurement_does_not_prolong_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 1, *IMAGE), dtype=np.uint8)
    trials, read, calls = Trials(StackLayout(IMAGE, noise.dtype), 1, 64), StoreReader.__call__, []

    def interrupted(reader: StoreReader, cold: ColdMemory, n: int, turn: int) -> None:
        calls.append(n)
        if n == 2 and len(calls) % 3 == 0:
            raise KeyboardInterrupt
        read(reader, cold, n, turn)

    monkeypatch.setattr(StoreReader, "__call__", interrupted)
    for step in [*noise, *noise, *noise, *noise, *noise]:
        with contextlib.suppress(KeyboardInterrupt):
            trials.add(step)
    assert trials.is_complete


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

    def write_all() -> None:
        for slot, image in enumerate(images):
            store.write(0, slot, store.checked(image[None]))

    with pytest.warns(UserWarning, match="are not RGB, so they are stored without indexed_colour"):
        write_all()
    (found,) = store.read([(0, np.arange(70))], np.zeros(70, dtype=np.int64))
    np.testing.assert_array_equal(found, images)


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
