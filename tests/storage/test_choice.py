"""``auto``: how codecs are tried, and which one is chosen."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.storage import observation_store, reading_time
from sb3_extra_buffers.storage.choice import Trial, Trials
from sb3_extra_buffers.storage.config import CodecRecipe, StorageConfig
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.reading_time import ColdMemory, ReadingTime, Sb3Reader, StoreReader
from sb3_extra_buffers.storage.stacking import StackLayout
from tests.storage.helpers import IMAGE, scene


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
