"""The options of buffers do what they say, through SB3 as well, and survive saving and loading."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv

from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
    DummyCls,
)
from sb3_extra_buffers.storage import observation_index
from tests.environments import SpaceEnv
from tests.methods import METHODS
from tests.transitions import add_to_replay, add_to_rollout, assert_same, play, sample_both

IMAGES = spaces.Box(0, 255, (4, 36, 36), np.uint8)
VECTORS = spaces.Box(-np.inf, np.inf, (5,), np.float64)
ACTIONS = spaces.Discrete(3)
STEPS = 60


def filled(space: spaces.Space = IMAGES, cls: type = CompressedReplayBuffer, n: int = STEPS, **options: Any) -> Any:
    buffer = cls(2 * STEPS, space, ACTIONS, "cpu", n_envs=2, **options)
    for transition in itertools.islice(play(space, 2, action_space=ACTIONS), n):
        add_to_replay([buffer], transition)
    return buffer


def sample(buffer: Any, batch_size: int = 50) -> Any:
    np.random.seed(0)
    return buffer.sample(batch_size)


class TestOutputDtype:
    def test_raw_is_that_of_the_space(self) -> None:
        assert sample(filled(IMAGES)).observations.dtype == th.uint8
        assert sample(filled(VECTORS)).observations.dtype == th.float64
        assert sample(filled(spaces.Discrete(9))).observations.dtype == th.int64

    @pytest.mark.parametrize("space", [IMAGES, VECTORS, spaces.Discrete(9)], ids=["images", "vectors", "Discrete"])
    def test_float_is_float32_with_the_same_values(self, space: spaces.Space) -> None:
        raw, as_float = sample(filled(space)), sample(filled(space, output_dtype="float"))
        for name in ("observations", "next_observations"):
            assert getattr(as_float, name).dtype == th.float32
            assert th.equal(getattr(as_float, name), getattr(raw, name).to(th.float32))

    def test_float_with_narrower_elements_gives_what_is_stored(self) -> None:
        with pytest.warns(UserWarning, match="saturate"):
            buffer = filled(VECTORS, output_dtype="float", dtypes=np.int8)
        found = sample(buffer).observations
        assert found.dtype == th.float32
        assert th.equal(found, found.round())


class TestNormalizeImages:
    def test_images_come_as_floats_from_0_to_1(self) -> None:
        raw, normalized = sample(filled()), sample(filled(normalize_images=True))
        for name in ("observations", "next_observations"):
            found = getattr(normalized, name)
            assert found.dtype == th.float32
            assert th.equal(found, getattr(raw, name).to(th.float32) / 255)

    def test_vectors_stay_as_they_are(self) -> None:
        assert_same(sample(filled(VECTORS, normalize_images=True)), sample(filled(VECTORS)))

    def test_each_key_of_a_dict_for_itself(self) -> None:
        space = spaces.Dict({"image": IMAGES, "vector": VECTORS})
        raw = sample(filled(space, CompressedDictReplayBuffer)).observations
        found = sample(filled(space, CompressedDictReplayBuffer, normalize_images=True)).observations
        assert th.equal(found["image"], raw["image"].to(th.float32) / 255)
        assert_same(found["vector"], raw["vector"])

    def test_in_rollouts(self) -> None:
        batches = []
        for normalize_images in (False, True):
            buffer = CompressedRolloutBuffer(STEPS, IMAGES, ACTIONS, "cpu", n_envs=2, normalize_images=normalize_images)
            for transition in itertools.islice(play(IMAGES, 2, action_space=ACTIONS), STEPS):
                add_to_rollout([buffer], transition)
            np.random.seed(0)
            batches.append(next(buffer.get(20)).observations)
        assert th.equal(batches[1], batches[0].to(th.float32) / 255)


class TestMemoryUsage:
    @pytest.mark.parametrize("method", METHODS)
    def test_adds_up_and_names_the_method(self, method: str) -> None:
        usage = filled(compression_method=method).memory_usage()
        assert usage.total == usage.payload + usage.references + usage.index + usage.fields
        fields_in_sb3 = 8 + 4 + 4 + 4  # action, reward, done, timeout
        assert usage.raw_equivalent == 2 * STEPS * (2 * 4 * 36 * 36 + fields_in_sb3)
        assert usage.transitions == 2 * STEPS
        assert usage.ratio == usage.raw_equivalent / usage.total
        assert usage.bytes_per_transition == usage.total / usage.transitions
        assert usage.method.startswith(method) or method == "auto"
        assert method != "auto" or usage.method.endswith("(auto)")

    def test_says_that_nothing_was_decided_yet(self) -> None:
        assert "not enough seen yet" in filled(n=3).memory_usage().method

    def test_of_an_empty_buffer(self) -> None:
        usage = filled(n=0).memory_usage()
        assert usage.transitions == usage.raw_equivalent == 0
        assert "0 transitions" in repr(usage)

    def test_is_readable(self) -> None:
        text = repr(filled(compression_method="gzip5").memory_usage())
        assert "120 transitions, method gzip5" in text
        assert "SB3 would take" in text
        assert "times smaller" in text

    def test_names_every_key_of_a_dict(self) -> None:
        space = spaces.Dict({"image": IMAGES, "vector": VECTORS})
        usage = filled(space, CompressedDictReplayBuffer, compression_method="rle").memory_usage()
        assert usage.method == "image: rle, vector: rle"

    def test_is_far_smaller_than_sb3_where_frames_are_shared(self) -> None:
        """Eight frames per transition in SB3, one here, before any codec."""
        assert filled(compression_method="none").memory_usage().ratio > 3


@pytest.mark.parametrize(
    ("method", "n_steps", "duplicate"),
    [
        *((method, STEPS + 20, lambda buffer: pickle.loads(pickle.dumps(buffer))) for method in METHODS),
        ("auto", STEPS + 20, copy.deepcopy),
        ("auto", 10, lambda buffer: pickle.loads(pickle.dumps(buffer))),
    ],
)
def test_a_copy_goes_on_where_the_buffer_was(method: str, n_steps: int, duplicate: Any) -> None:
    plain = ReplayBuffer(2 * STEPS, IMAGES, ACTIONS, "cpu", n_envs=2)
    buffer = CompressedReplayBuffer(2 * STEPS, IMAGES, ACTIONS, "cpu", n_envs=2, compression_method=method)
    transitions = play(IMAGES, 2, action_space=ACTIONS)
    for transition in itertools.islice(transitions, n_steps):
        add_to_replay([plain, buffer], transition)
    buffer.sample(100)  # so that there is output memory that must not go along
    other = duplicate(buffer)
    sample_both(plain, other, batch_size=50, seed=0)
    for transition in itertools.islice(transitions, 50):
        add_to_replay([plain, other], transition)
    sample_both(plain, other, batch_size=50, seed=1)


def test_a_rollout_buffer_can_be_copied_at_any_time() -> None:
    buffer = CompressedRolloutBuffer(STEPS, IMAGES, ACTIONS, "cpu", n_envs=2)
    for transition in itertools.islice(play(IMAGES, 2, action_space=ACTIONS), STEPS):
        add_to_rollout([buffer], transition)
    before = copy.deepcopy(buffer)
    for one in (buffer, before):
        np.random.seed(0)
        one.batches = tuple(one.get(30))
    assert_same(before.batches, buffer.batches)
    after = pickle.loads(pickle.dumps(buffer))
    after.reset()
    assert (after.pos, after.full) == (0, False)


def env() -> VecEnv:
    return make_vec_env(lambda: SpaceEnv(IMAGES, ACTIONS), n_envs=2, seed=0)


SMALL = {"features_extractor_kwargs": {"features_dim": 8}, "net_arch": [8]}
DQN_OPTIONS: dict[str, Any] = {
    "learning_starts": 20,
    "train_freq": 8,
    "batch_size": 8,
    "buffer_size": 100,
    "policy_kwargs": SMALL,
    "device": "cpu",
    "seed": 0,
}


class TestThroughSB3:
    kwargs: dict[str, Any] = {  # noqa: RUF012
        "compression_method": "gzip5",
        "frame_stack": 4,
        "normalize_images": True,
        "dtypes": {"elem_type": np.uint8},
    }

    def trained(self) -> DQN:
        return DQN(
            "CnnPolicy",
            env(),
            replay_buffer_class=CompressedReplayBuffer,
            replay_buffer_kwargs=self.kwargs,
            **DQN_OPTIONS,
        )

    def test_a_saved_model_is_loaded_with_its_buffer_options(self, tmp_path: Path) -> None:
        model = self.trained().learn(60)
        model.save(tmp_path / "model")
        loaded = DQN.load(tmp_path / "model", env=env())
        assert loaded.replay_buffer_kwargs == self.kwargs
        buffer = loaded.replay_buffer
        assert type(buffer) is CompressedReplayBuffer
        assert buffer.normalize_images
        loaded.learn(60)
        assert buffer.memory_usage().method == "gzip5"
        assert buffer.sample(4).observations.dtype == th.float32

    def test_a_placeholder_spares_the_buffer(self, tmp_path: Path) -> None:
        model = self.trained().learn(30)
        model.save(tmp_path / "model")
        loaded = DQN.load(tmp_path / "model", custom_objects={"replay_buffer_class": DummyCls})
        assert isinstance(loaded.replay_buffer, DummyCls)
        observation = env().reset()
        assert np.array_equal(
            loaded.predict(observation, deterministic=True)[0], model.predict(observation, deterministic=True)[0]
        )

    def test_a_placeholder_spares_the_rollout_buffer(self, tmp_path: Path) -> None:
        model = PPO(
            "CnnPolicy",
            env(),
            n_steps=8,
            batch_size=16,
            rollout_buffer_class=CompressedRolloutBuffer,
            policy_kwargs=SMALL,
        )
        model.save(tmp_path / "model")
        loaded = PPO.load(tmp_path / "model", custom_objects={"rollout_buffer_class": DummyCls})
        assert isinstance(loaded.rollout_buffer, DummyCls)
        loaded.predict(env().reset())

    @pytest.mark.parametrize("truncate", [False, True])
    def test_a_saved_buffer_is_loaded_and_trained_on(self, tmp_path: Path, truncate: bool) -> None:
        model = self.trained().learn(70)
        model.save_replay_buffer(tmp_path / "buffer")
        other = self.trained()
        other.load_replay_buffer(tmp_path / "buffer.pkl", truncate_last_traj=truncate)
        assert_same(sample(other.replay_buffer), sample(model.replay_buffer))
        assert other.replay_buffer.device == other.device
        other.learn(30, reset_num_timesteps=False)
        assert other.replay_buffer.size() == 50

    def test_a_saved_buffer_is_small(self, tmp_path: Path) -> None:
        sizes = []
        for options in ({}, {"replay_buffer_class": CompressedReplayBuffer}):
            model = DQN("CnnPolicy", env(), **options, **{**DQN_OPTIONS, "learning_starts": 1000, "buffer_size": 300})
            model.learn(300)
            model.save_replay_buffer(tmp_path / "buffer")
            sizes.append((tmp_path / "buffer.pkl").stat().st_size)
        assert sizes[1] < sizes[0] / 3

    def test_training_goes_on_from_a_loaded_buffer_as_it_would_have_from_the_saved_one(self, tmp_path: Path) -> None:
        model = self.trained().learn(60)
        model.save(tmp_path / "model")
        model.save_replay_buffer(tmp_path / "buffer")
        policies = []
        for _ in range(2):
            loaded = DQN.load(tmp_path / "model", env=env())
            loaded.load_replay_buffer(tmp_path / "buffer")
            loaded.set_random_seed(1)
            loaded.learn(40, reset_num_timesteps=False)
            policies.append(loaded.policy.state_dict())
        assert all(th.equal(policies[0][name], policies[1][name]) for name in policies[0])


def test_a_reset_replay_buffer_starts_anew() -> None:
    plain = ReplayBuffer(2 * STEPS, IMAGES, ACTIONS, "cpu", n_envs=2)
    buffers = [plain, CompressedReplayBuffer(2 * STEPS, IMAGES, ACTIONS, "cpu", n_envs=2)]
    transitions = play(IMAGES, 2, action_space=ACTIONS)
    for n_steps in (STEPS + 10, 20, 3 * STEPS):
        for buffer in buffers:
            buffer.reset()
        for transition in itertools.islice(transitions, n_steps):
            add_to_replay(buffers, transition)
        sample_both(*buffers, batch_size=60, seed=n_steps)


def test_resetting_again_and_again_takes_no_more_and_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in SB3, what lies beyond the newest transitions stays there, so that it is not simply thrown away."""
    monkeypatch.setattr(observation_index, "_WORTH_COMPACTING", 1 << 16)
    space = spaces.Box(0, 255, (1, 20, 20), np.uint8)
    buffer = CompressedReplayBuffer(300, space, ACTIONS, "cpu", compression_method="none", frame_stack=None)
    transitions = play(space, action_space=ACTIONS)
    for transition in itertools.islice(transitions, 300):
        buffer.add(*transition)
    full = buffer.memory_usage().total
    for _ in range(100):
        buffer.reset()
        for transition in itertools.islice(transitions, 20):
            buffer.add(*transition)
        assert buffer.memory_usage().payload < 4 * full
