"""Nothing corrupts an observation: not its values, not the options, not what the user does with arrays and tensors."""

from __future__ import annotations

import gc
import itertools
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO

from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
    find_buffer_dtypes,
    find_smallest_dtype,
)
from tests.methods import METHODS, installed
from tests.transitions import play

ACTIONS = spaces.Discrete(5)
STEPS = 50
"""More than it takes until a buffer has decided how to store observations."""


def stored_and_read(observations: np.ndarray, space: spaces.Box | None = None, **options: Any) -> np.ndarray:
    """Add observations one by one to a buffer for one environment, and read them all back."""
    dtype = observations.dtype
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    space = space or spaces.Box(low, high, observations.shape[1:], dtype)
    buffer = CompressedReplayBuffer(len(observations), space, ACTIONS, device="cpu", **options)
    add_all(buffer, observations)
    return buffer.observations[np.arange(len(observations)), 0]


def add_all(buffer: CompressedReplayBuffer, observations: np.ndarray) -> None:
    following = np.roll(observations, -1, axis=0)
    for obs, next_obs in zip(observations, following, strict=True):
        buffer.add(obs[None], next_obs[None], np.zeros(1), np.zeros(1), np.zeros(1), [{}])


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


def full_buffer(shape: tuple[int, ...] = (4, 40, 40), method: str = "auto", steps: int = STEPS, **options: Any) -> Any:
    space = spaces.Box(0, 255, shape, np.uint8)
    buffer = CompressedReplayBuffer(2 * steps, space, ACTIONS, "cpu", n_envs=2, compression_method=method, **options)
    for transition in itertools.islice(play(space, 2), steps):
        buffer.add(*transition)
    return buffer


def sample(buffer: CompressedReplayBuffer, seed: int = 0, batch_size: int = 64) -> Any:
    np.random.seed(seed)
    return buffer.sample(batch_size)


class TestValues:
    @pytest.mark.parametrize("runs_type", [np.uint8, np.uint16, np.uint32, np.int8, np.int32])
    @pytest.mark.parametrize("method", installed("rle", "rle-jit", "rle-old"))
    def test_runs_longer_than_their_dtype_can_count(self, method: str, runs_type: Any) -> None:
        frames = np.repeat(np.arange(5, dtype=np.uint8), 8)[:, None, None, None] * np.ones((1, 300, 300), np.uint8)
        frames[20:, 0, :1] += 1
        dtypes = {"elem_type": np.uint8, "runs_type": runs_type}
        assert_same_bits(stored_and_read(frames, compression_method=method, dtypes=dtypes), frames)

    @pytest.mark.parametrize("method", METHODS)
    def test_constant_frames_of_90000_pixels(self, method: str) -> None:
        frames = np.full((40, 300, 300), 7, np.uint8)
        assert_same_bits(stored_and_read(frames, compression_method=method), frames)

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16], ids=["float32", "float64", "float16"])
    def test_every_kind_of_float(self, dtype: Any, method: str) -> None:
        """Infinities, zeros of both signs, denormals and NaN with any payload, between random bits."""
        bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
        rng = np.random.default_rng(0)
        values = rng.integers(0, np.iinfo(bits).max, size=(STEPS, 30), dtype=bits, endpoint=True)
        info = np.finfo(dtype)
        special = np.array([np.inf, -np.inf, 0.0, -0.0, info.tiny / 2, -info.smallest_subnormal, np.nan], dtype)
        one_nan = bits.type(special[-1:].view(bits)[0] | bits.type(5))
        values[:, :7], values[:, 7] = special.view(bits), one_nan
        values[STEPS // 2 :, :20] = values[0, :20]
        assert_same_bits(stored_and_read(values.view(dtype), compression_method=method), values.view(dtype))

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.int8, np.uint64])
    def test_the_limits_of_every_integer_dtype(self, dtype: Any, method: str) -> None:
        limits = np.iinfo(dtype)
        rng = np.random.default_rng(0)
        values = rng.integers(limits.min, limits.max, size=(STEPS, 3, 5), dtype=dtype, endpoint=True)
        values[:, 0], values[:, 1, :2] = limits.min, limits.max
        space = spaces.Box(limits.min, limits.max, (3, 5), dtype)
        assert_same_bits(stored_and_read(values, space, compression_method=method), values)

    def test_floats_in_the_default_configuration(self) -> None:
        values = np.random.default_rng(0).normal(size=(STEPS, 17)).astype(np.float32)
        assert_same_bits(stored_and_read(values), values)

    @pytest.mark.parametrize("method", METHODS)
    def test_incompressible_noise(self, method: str) -> None:
        values = np.random.default_rng(0).integers(0, 256, size=(STEPS, 4, 15, 15), dtype=np.uint8)
        assert_same_bits(stored_and_read(values, compression_method=method), values)

    def test_slots_that_were_never_written_are_zero(self) -> None:
        buffer = CompressedReplayBuffer(10, spaces.Box(0, 255, (3, 4), np.uint8), ACTIONS, device="cpu")
        add_all(buffer, np.full((3, 3, 4), 9, np.uint8))
        found = buffer.observations[np.arange(10), 0]
        assert (found[:3] == 9).all()
        assert not found[3:].any()


class TestNarrowerElements:
    """An ``elem_type`` that does not hold every value is the user's choice, and said aloud."""

    space = spaces.Box(-1000, 1000, (6,), np.float32)
    values = np.array([[-3.0, 0.0, 7.9, 255.0, 256.0, 1e3]] * STEPS, np.float32)

    def test_saturates_and_keeps_the_output_dtype(self) -> None:
        with pytest.warns(UserWarning, match=r"float32.*uint8.*saturate") as caught:
            found = stored_and_read(self.values, self.space, dtypes={"elem_type": np.uint8})
        assert len(caught) == 1
        assert_same_bits(found, np.array([[0, 0, 7, 255, 255, 255]] * STEPS, np.float32))

    def test_takes_a_dtype_alone(self) -> None:
        with pytest.warns(UserWarning, match="saturate"):
            found = stored_and_read(self.values, self.space, dtypes=np.int8)
        assert_same_bits(found, np.array([[-3, 0, 7, 127, 127, 127]] * STEPS, np.float32))

    @pytest.mark.parametrize(
        ("stored", "values", "expected"),
        [
            (np.uint8, [np.nan, np.inf, -np.inf], [0, 255, 0]),
            (np.int32, [np.nan, np.inf, -np.inf], [0, 2147483520, -(2**31)]),
            (np.float16, [np.inf, 1e6, -1e6], [np.inf, 65504, -65504]),
        ],
    )
    def test_of_what_is_no_number(self, stored: Any, values: list[float], expected: list[float]) -> None:
        with pytest.warns(UserWarning, match="saturate"):
            found = stored_and_read(np.array([values] * STEPS, np.float32), dtypes=stored)
        assert_same_bits(found, np.array([expected] * STEPS, np.float32))

    @pytest.mark.parametrize("signed", [np.int64, np.int32])
    def test_of_integers(self, signed: Any) -> None:
        values = np.array([[-5, 3, 300]] * STEPS, signed)
        space = spaces.Box(-1000, 1000, (3,), signed)
        with pytest.warns(UserWarning, match="saturate"):
            found = stored_and_read(values, space, dtypes={"elem_type": np.uint8})
        assert_same_bits(found, np.array([[0, 3, 255]] * STEPS, signed))

    def test_a_wider_type_is_no_loss_and_no_warning(self) -> None:
        values = np.random.default_rng(0).integers(0, 256, size=(STEPS, 9), dtype=np.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same_bits(stored_and_read(values, dtypes={"elem_type": np.float32}), values)

    @pytest.mark.filterwarnings("ignore:Observations of dtype float32 are stored as uint8")
    def test_the_classic_cartpole_example_runs(self) -> None:
        model = PPO(
            "MlpPolicy",
            gym.make("CartPole-v1"),
            n_steps=64,
            n_epochs=2,
            rollout_buffer_class=CompressedRolloutBuffer,
            rollout_buffer_kwargs={
                "dtypes": {"elem_type": np.uint8, "runs_type": find_smallest_dtype(4)},
                "compression_method": "rle",
            },
            device="cpu",
        )
        model.learn(128)
        assert model.num_timesteps == 128


class TestArguments:
    def test_a_dict_of_dtypes_serves_several_buffers_and_stays_as_it_is(self) -> None:
        dtypes = find_buffer_dtypes((4, 8, 8), np.uint8, "rle")
        before = dict(dtypes)
        for shape in ((4, 8, 8), (1, 300, 300), (2,)):
            space = spaces.Box(0, 255, shape, np.uint8)
            for method in ("rle", "gzip", "auto"):
                CompressedReplayBuffer(10, space, ACTIONS, dtypes=dtypes, compression_method=method)
        frames = np.full((40, 300, 300), 3, np.uint8)
        assert_same_bits(stored_and_read(frames, dtypes=dtypes, compression_method="rle"), frames)
        assert dtypes == before

    def test_dicts_of_codec_options_stay_as_they_are(self) -> None:
        options = {"compresslevel": 2}
        space = spaces.Box(0, 255, (4, 8, 8), np.uint8)
        buffer = CompressedReplayBuffer(10, space, ACTIONS, compression_method="gzip5", compression_kwargs=options)
        assert options == {"compresslevel": 2}
        options["compresslevel"] = 99
        for transition in itertools.islice(play(space), 40):
            buffer.add(*transition)
        assert buffer.memory_usage().method == "gzip2"


class TestArraysThatTheUserKeepsOrChanges:
    """Batches of more than 64 kB are written into memory that was used before, if nobody holds it any more."""

    @pytest.mark.parametrize("method", installed("none", "rle", "zstd", "delta"))
    def test_changing_a_batch_changes_nothing_else(self, method: str) -> None:
        buffer = full_buffer(method=method)
        expected = sample(buffer).observations.clone()
        for _ in range(3):
            batch = sample(buffer)
            batch.observations.add_(1)
            batch.next_observations.zero_()
            del batch
        assert th.equal(sample(buffer).observations, expected)

    @pytest.mark.parametrize("method", installed("none", "rle", "zstd", "delta"))
    def test_batches_that_are_kept_stay_as_they_are(self, method: str) -> None:
        buffer = full_buffer(method=method)
        kept = [sample(buffer, seed) for seed in range(8)]
        copies = [batch.observations.clone() for batch in kept]
        next_copies = [batch.next_observations.clone() for batch in kept]
        for seed in range(8, 16):
            sample(buffer, seed)
        for batch, copy, next_copy in zip(kept, copies, next_copies, strict=True):
            assert th.equal(batch.observations, copy)
            assert th.equal(batch.next_observations, next_copy)
        pointers = [tensor.data_ptr() for batch in kept for tensor in (batch.observations, batch.next_observations)]
        assert len(set(pointers)) == len(pointers)

    @pytest.mark.parametrize(
        "keep",
        [
            lambda tensor: tensor[3:5],
            lambda tensor: tensor.detach(),
            lambda tensor: tensor.view(th.int8),
            lambda tensor: tensor.permute(0, 2, 3, 1),
            lambda tensor: tensor.numpy(),
            lambda tensor: tensor.numpy()[::2, 0],
            lambda tensor: memoryview(tensor.numpy()),
            lambda tensor: th.empty(0, dtype=th.uint8).set_(tensor.untyped_storage()),
            lambda tensor: np.from_dlpack(tensor),
        ],
        ids=["slice", "detach", "view", "permute", "numpy", "numpy slice", "memoryview", "storage", "dlpack"],
    )
    def test_a_view_keeps_its_memory_from_being_used_again(self, keep: Any) -> None:
        buffer = full_buffer()
        batch = sample(buffer)
        view, expected = keep(batch.observations), keep(batch.observations.clone())
        address = batch.observations.data_ptr()
        del batch
        for seed in range(1, 6):
            later = sample(buffer, seed)
            assert address not in (later.observations.data_ptr(), later.next_observations.data_ptr())
        assert np.array_equal(np.asarray(view), np.asarray(expected))

    def test_memory_that_nobody_holds_is_used_again(self) -> None:
        buffer = full_buffer()
        sample(buffer)
        seen = {sample(buffer, seed).observations.data_ptr() for seed in range(10)}
        assert len(seen) <= 3

    def test_a_batch_outlives_its_buffer(self) -> None:
        buffer = full_buffer()
        batch = sample(buffer)
        expected = batch.observations.clone()
        del buffer
        gc.collect()
        junk = [np.full(expected.numel(), 77, np.uint8) for _ in range(8)]
        assert th.equal(batch.observations, expected)
        del junk

    def test_arrays_read_by_index_are_the_callers_own(self) -> None:
        buffer = full_buffer()
        where, envs = np.arange(STEPS), np.ones(STEPS, int)
        first = buffer.observations[where, envs]
        expected = first.copy()
        first[:] = 0
        assert_same_bits(buffer.observations[where, envs], expected)

    def test_rollout_batches_that_are_kept_stay_as_they_are(self) -> None:
        space = spaces.Box(0, 255, (4, 40, 40), np.uint8)
        buffer = CompressedRolloutBuffer(64, space, ACTIONS, "cpu", n_envs=2)
        transitions = play(space, 2)
        kept = []
        for _ in range(2):
            buffer.reset()
            for obs, _, action, reward, done, _ in itertools.islice(transitions, 64):
                buffer.add(obs, action, reward, done, th.zeros(2), th.zeros(2))
            batches = [batch for _ in range(2) for batch in buffer.get(32)]
            kept += [(batch.observations, batch.observations.clone()) for batch in batches]
        assert all(th.equal(tensor, copy) for tensor, copy in kept)


class TestObservationsThatTheEnvironmentReuses:
    def test_in_a_replay_buffer(self) -> None:
        space = spaces.Box(0, 255, (2, 6, 6), np.uint8)
        frames = np.random.default_rng(0).integers(0, 256, size=(STEPS, 2, 6, 6), dtype=np.uint8)
        buffer = CompressedReplayBuffer(STEPS, space, ACTIONS, device="cpu", frame_stack=None)
        obs, next_obs = np.zeros((1, 2, 6, 6), np.uint8), np.zeros((1, 2, 6, 6), np.uint8)
        reward, done, action = np.zeros(1), np.zeros(1), np.zeros(1, int)
        for t in range(STEPS):
            obs[0], next_obs[0] = frames[t], frames[(t + 1) % STEPS]
            reward[0], done[0], action[0] = t, t % 2, t % 5
            buffer.add(obs, next_obs, action, reward, done, [{}])
            for array in (obs, next_obs, action, reward, done):
                array[:] = 99
        assert_same_bits(buffer.observations[np.arange(STEPS), 0], frames)
        assert_same_bits(buffer.next_observations[np.arange(STEPS), 0], np.roll(frames, -1, axis=0))
        assert buffer.rewards[:, 0].tolist() == list(range(STEPS))
        assert buffer.actions[:, 0, 0].tolist() == [t % 5 for t in range(STEPS)]

    def test_in_a_dict_buffer_whose_dict_is_reused_too(self) -> None:
        space = spaces.Dict({"image": spaces.Box(0, 255, (2, 3), np.uint8), "place": spaces.Discrete(100)})
        buffer = CompressedDictReplayBuffer(STEPS, space, ACTIONS, device="cpu")
        obs = {"image": np.zeros((1, 2, 3), np.uint8), "place": np.zeros(1, np.int64)}
        shapes = {key: array.shape for key, array in obs.items()}
        for t in range(STEPS):
            obs["image"][:], obs["place"][:] = t, t
            buffer.add(obs, obs, np.zeros(1), np.zeros(1), np.zeros(1), [{}])
        obs["image"][:], obs["place"][:] = 0, 0
        assert buffer.observations["place"][np.arange(STEPS), 0, 0].tolist() == list(range(STEPS))
        assert buffer.next_observations["image"][np.arange(STEPS), 0, 1, 2].tolist() == list(range(STEPS))
        assert {key: array.shape for key, array in obs.items()} == shapes

    def test_non_contiguous_and_read_only_observations(self) -> None:
        space = spaces.Box(0, 255, (3, 4, 5), np.uint8)
        frames = np.random.default_rng(0).integers(0, 256, size=(STEPS, 1, 4, 5, 3), dtype=np.uint8)
        frames.flags.writeable = False
        buffer = CompressedReplayBuffer(STEPS, space, ACTIONS, device="cpu", compression_method="delta")
        for frame in frames:
            seen = np.moveaxis(frame, -1, 1)
            assert not seen.flags.c_contiguous
            buffer.add(seen, np.asfortranarray(seen[::-1]), np.zeros(1), np.zeros(1), np.zeros(1), [{}])
        expected = np.ascontiguousarray(np.moveaxis(frames[:, 0], -1, 1))
        assert_same_bits(buffer.observations[np.arange(STEPS), 0], expected)
        assert_same_bits(buffer.next_observations[np.arange(STEPS), 0], expected)
