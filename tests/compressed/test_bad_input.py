"""Mistakes are said at once, in words that name what was given and what would work. Nothing is stored halfway."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_extra_buffers.codecs import availability
from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedDictRolloutBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
)
from sb3_extra_buffers.errors import (
    ConfigurationError,
    EmptyBufferError,
    ExtraBuffersError,
    LevelError,
    MissingPackageError,
    ObservationError,
    OptionError,
    UnknownMethodError,
)
from tests.transitions import assert_same, play

IMAGES = spaces.Box(0, 255, (4, 6, 7), np.uint8)
ACTIONS = spaces.Discrete(5)
BOTH = pytest.mark.parametrize("buffer_class", [CompressedReplayBuffer, CompressedRolloutBuffer])


@BOTH
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"compression_method": "zip"}, UnknownMethodError, ["'zip'", "zstd", "rle-jit", "auto"]),
        ({"compression_method": "zst-5"}, UnknownMethodError, ["'zst-5'", "zstd"]),
        ({"compression_method": "zstd--5"}, UnknownMethodError, ["'zstd--5'", "zstd-5"]),
        ({"compression_method": "lz4-frame5"}, UnknownMethodError, ["'lz4-frame5'", "lz4-frame/5"]),
        ({"compression_method": "auto3"}, UnknownMethodError, ["'auto3'"]),
        ({"compression_method": ""}, UnknownMethodError, ["''"]),
        ({"compression_method": 5}, UnknownMethodError, ["5", "string"]),
        ({"compression_method": "gzip10"}, LevelError, ["10", "gzip", "0..9"]),
        ({"compression_method": "zstd23"}, LevelError, ["23", "-100..-1 and 1..22"]),
        ({"compression_method": "rle/3"}, LevelError, ["'rle'", "no levels"]),
        (
            {"compression_method": "gzip", "compression_kwargs": {"compresslevel": 77}},
            LevelError,
            ["77", "0..9"],
        ),
        (
            {"compression_method": "gzip", "compression_kwargs": {"compress_level": 3}},
            OptionError,
            ["'gzip'", "'compress_level'", "compresslevel"],
        ),
        (
            {"compression_method": "rle", "decompression_kwargs": {"fast": True}},
            OptionError,
            ["'rle'", "'fast'", "runs_type"],
        ),
        ({"compression_kwargs": {"compresslevel": 3}}, ConfigurationError, ["'auto'", "compresslevel"]),
        ({"dtypes": {"elem_typ": np.uint8}}, ConfigurationError, ["'elem_typ'", "'elem_type'", "'runs_type'"]),
        ({"dtypes": "no_such_dtype"}, ConfigurationError, ["no_such_dtype"]),
        ({"dtypes": {"elem_type": "no_such_dtype"}}, ConfigurationError, ["no_such_dtype"]),
        ({"dtypes": {"elem_type": object}}, ConfigurationError, ["elem_type", "object"]),
        (
            {"compression_method": "rle", "dtypes": {"runs_type": np.float32}},
            ConfigurationError,
            ["runs_type", "float32"],
        ),
        ({"frame_stack": 0}, ConfigurationError, ["frame_stack", "0", "16"]),
        ({"frame_stack": -4}, ConfigurationError, ["frame_stack", "-4"]),
        ({"frame_stack": 17}, ConfigurationError, ["frame_stack", "17"]),
        ({"frame_stack": "four"}, ConfigurationError, ["frame_stack", "'four'", "'auto'"]),
        ({"frame_stack": 2.5}, ConfigurationError, ["frame_stack", "2.5", "'auto'"]),
        ({"frame_stack": 5}, ConfigurationError, ["frame_stack=5", "(4, 6, 7)"]),
        ({"output_dtype": "float64"}, ConfigurationError, ["'float64'", "'raw'", "'float'"]),
        ({"buffer_size": 0}, ConfigurationError, ["buffer_size", "0"]),
        ({"buffer_size": -5}, ConfigurationError, ["buffer_size", "-5"]),
        ({"n_envs": 0}, ConfigurationError, ["n_envs", "0"]),
    ],
    ids=str,
)
def test_arguments_that_cannot_work(
    buffer_class: type, options: dict[str, Any], error: type[ExtraBuffersError], words: list[str]
) -> None:
    arguments = {"buffer_size": 10, "observation_space": IMAGES, "action_space": ACTIONS, **options}
    with pytest.raises(error) as raised:
        buffer_class(**arguments)
    assert isinstance(raised.value, ExtraBuffersError)
    assert isinstance(raised.value, ValueError)
    for word in words:
        assert word in str(raised.value)


def test_memory_optimisation_together_with_timeouts() -> None:
    with pytest.raises(ConfigurationError, match="optimize_memory_usage"):
        CompressedReplayBuffer(10, IMAGES, ACTIONS, optimize_memory_usage=True)


@BOTH
@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Tuple([IMAGES])], ids=["Text", "Tuple"])
def test_spaces_that_cannot_be_stored(buffer_class: type, space: spaces.Space) -> None:
    with pytest.raises((ExtraBuffersError, NotImplementedError)):
        buffer_class(10, space, ACTIONS)


@pytest.mark.parametrize(
    ("method", "package", "extra"),
    [
        ("igzip", "isal", "isal"),
        ("zstd-5", "zstandard", "zstd"),
        ("zstd-dict", "zstandard", "zstd"),
        ("lz4-frame/1", "lz4", "lz4"),
        ("lz4-block", "lz4", "lz4"),
        ("rle-jit", "numba", "numba"),
    ],
)
def test_a_missing_package(method: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = availability.is_installed
    monkeypatch.setattr(availability, "is_installed", lambda name: name != package and there(name))
    with pytest.raises(MissingPackageError) as raised:
        CompressedReplayBuffer(10, IMAGES, ACTIONS, compression_method=method)
    assert isinstance(raised.value, ImportError)
    assert f'pip install "sb3-extra-buffers[{extra}]"' in str(raised.value)
    assert package in str(raised.value)


def test_auto_does_without_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "is_installed", lambda name: False)
    buffer = CompressedReplayBuffer(100, IMAGES, ACTIONS, "cpu", n_envs=2)
    for transition in itertools.islice(play(IMAGES, 2), 70):
        buffer.add(*transition)
    assert buffer.sample(5).observations.shape == (5, 4, 6, 7)


class TestNothingToSample:
    def test_in_an_empty_replay_buffer(self) -> None:
        buffer = CompressedReplayBuffer(10, IMAGES, ACTIONS)
        with pytest.raises(EmptyBufferError, match="empty"):
            buffer.sample(4)
        assert issubclass(EmptyBufferError, ValueError)

    def test_after_a_reset(self) -> None:
        buffer = CompressedReplayBuffer(10, IMAGES, ACTIONS, "cpu")
        buffer.add(*next(play(IMAGES)))
        buffer.sample(4)
        buffer.reset()
        with pytest.raises(EmptyBufferError):
            buffer.sample(4)

    def test_in_a_rollout_that_is_not_complete(self) -> None:
        buffer = CompressedRolloutBuffer(10, IMAGES, ACTIONS, "cpu")
        obs, _, action, reward, done, _ = next(play(IMAGES))
        for _ in range(3):
            buffer.add(obs, action, reward, done, th.zeros(1), th.zeros(1))
        with pytest.raises(EmptyBufferError, match="3 of 10"):
            buffer.get(5)


BAD_OBSERVATIONS = {
    "transposed": (np.zeros((2, 6, 7, 4), np.uint8), "(2, 4, 6, 7)"),
    "of too few environments": (np.zeros((1, 4, 6, 7), np.uint8), "(2, 4, 6, 7)"),
    "without environments": (np.zeros((4, 6, 7), np.uint8), "(4, 6, 7)"),
    "flat": (np.zeros((2, 168), np.uint8), "(2, 168)"),
    "with fractions": (np.full((2, 4, 6, 7), 0.5, np.float32), "float32"),
    "negative": (np.full((2, 4, 6, 7), -1, np.int64), "int64"),
    "complex": (np.full((2, 4, 6, 7), 1j), "complex128"),
    "of text": (np.full((2, 4, 6, 7), "x"), "<U1"),
}


@pytest.mark.parametrize("bad", BAD_OBSERVATIONS)
class TestObservationsThatDoNotFit:
    """The buffer that refused one is the one from before, and goes on."""

    @pytest.mark.parametrize("which", ["obs", "next_obs"])
    @pytest.mark.parametrize("n_steps", [3, 50])
    def test_in_a_replay_buffer(self, bad: str, which: str, n_steps: int) -> None:
        observations, word = BAD_OBSERVATIONS[bad]
        buffers = [CompressedReplayBuffer(80, IMAGES, ACTIONS, "cpu", n_envs=2) for _ in range(2)]
        transitions = play(IMAGES, 2)
        for transition in itertools.islice(transitions, n_steps):
            for buffer in buffers:
                buffer.add(*transition)
        with pytest.raises(ObservationError) as raised:
            buffers[0].add(*next(play(IMAGES, 2, seed=1))._replace(**{which: observations}))
        assert word in str(raised.value)
        self.check_same(*buffers)
        for transition in itertools.islice(transitions, 10):
            for buffer in buffers:
                buffer.add(*transition)
        self.check_same(*buffers)

    def test_in_one_key_of_a_dict_buffer(self, bad: str) -> None:
        space = spaces.Dict({"first": IMAGES, "last": IMAGES})
        buffers = [CompressedDictReplayBuffer(80, space, ACTIONS, "cpu", n_envs=2) for _ in range(2)]
        for transition in itertools.islice(play(space, 2), 50):
            for buffer in buffers:
                buffer.add(*transition)
        transition = next(play(space, 2, seed=1))
        with pytest.raises(ObservationError):
            buffers[0].add(*transition._replace(obs={**transition.obs, "last": BAD_OBSERVATIONS[bad][0]}))
        self.check_same(*buffers)

    def test_in_a_rollout_buffer(self, bad: str) -> None:
        buffer = CompressedRolloutBuffer(10, IMAGES, ACTIONS, "cpu", n_envs=2)
        _, _, action, reward, done, _ = next(play(IMAGES, 2))
        with pytest.raises(ObservationError):
            buffer.add(BAD_OBSERVATIONS[bad][0], action, reward, done, th.zeros(2), th.zeros(2))
        assert (buffer.pos, buffer.full) == (0, False)

    @staticmethod
    def check_same(changed: Any, untouched: Any) -> None:
        assert (changed.pos, changed.full) == (untouched.pos, untouched.full)
        batches = []
        for buffer in (changed, untouched):
            np.random.seed(0)
            batches.append(buffer.sample(100))
        assert_same(*batches)


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.int16, np.bool_])
def test_values_that_fit_are_welcome_in_any_dtype(dtype: Any) -> None:
    """Some wrappers change the dtype, and SB3's buffers cast without a word. So do these, where nothing is lost."""
    obs = np.arange(2 * 4 * 6 * 7).reshape(2, 4, 6, 7) % 2
    buffer = CompressedReplayBuffer(20, IMAGES, ACTIONS, "cpu", n_envs=2)
    for _ in range(10):
        buffer.add(obs.astype(dtype), obs.astype(dtype), np.zeros(2), np.zeros(2), np.zeros(2), [{}, {}])
    found = buffer.observations[3]
    assert found.dtype == np.uint8
    assert np.array_equal(found, obs)


def test_a_missing_key() -> None:
    space = spaces.Dict({"first": IMAGES, "last": IMAGES})
    transition = next(play(space))
    obs = {"first": transition.obs["first"]}
    replay = CompressedDictReplayBuffer(10, space, ACTIONS, "cpu")
    with pytest.raises(KeyError, match="last"):
        replay.add(obs, *transition[1:])
    rollout = CompressedDictRolloutBuffer(10, space, ACTIONS, "cpu")
    with pytest.raises(KeyError, match="last"):
        rollout.add(obs, *transition[2:5], th.zeros(1), th.zeros(1))
    assert (replay.pos, rollout.pos) == (0, 0)
