"""``verify=True``: what is read is compared with a checksum of what was stored."""

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
from stable_baselines3 import DQN

from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
)
from sb3_extra_buffers.errors import CorruptDataError
from tests.methods import installed
from tests.transitions import play

IMAGES = spaces.Box(0, 255, (4, 12, 12), np.uint8)
ACTIONS = spaces.Discrete(5)
methods = pytest.mark.parametrize("method", ["auto", *installed("none", "delta", "zstd-dict/3", "lz4-frame/1")])


def filled(method: str, n: int = 150, **options: Any) -> CompressedReplayBuffer:
    buffer = CompressedReplayBuffer(
        200, IMAGES, ACTIONS, "cpu", 2, compression_method=method, frame_stack=4, verify=True, **options
    )
    for step in itertools.islice(play(IMAGES, 2, action_space=ACTIONS), n):
        buffer.add(*step)
    return buffer


def damage(buffer: CompressedReplayBuffer) -> None:
    """Flip a bit in a record of an observation that is still there: what cosmic rays and bugs do."""
    store = buffer._stores[""]
    frames, oldest = store.frames, int(store.ends[0][buffer.pos, 0])
    place = (oldest - 1) // frames.codec.frames_per_record % frames.index.capacity
    frames.arena.data[int(frames.index.starts[0, place]) + int(frames.index.lengths[0, place]) // 2] ^= 4


@methods
def test_nothing_changes_as_long_as_all_is_right(method: str) -> None:
    buffer, plain = filled(method), filled(method)
    plain._stores[""].digests = None
    for seed in range(5):
        batches = []
        for each in (buffer, plain):
            np.random.seed(seed)
            batches.append(each.sample(64))
        assert all(th.equal(left, right) for left, right in zip(*batches, strict=True) if left is not None)


@methods
def test_a_flipped_bit_is_found_and_its_place_is_named(method: str) -> None:
    buffer = filled(method)
    damage(buffer)
    with pytest.raises(CorruptDataError, match=r"slot \d+ of environment 0|do(es)? not decode"):
        np.asarray(buffer.observations)


@methods
def test_checksums_go_where_the_buffer_goes(method: str, tmp_path: Path) -> None:
    buffer = filled(method)
    buffer.save(tmp_path / "buffer")
    for again in (
        CompressedReplayBuffer.load(tmp_path / "buffer", "cpu"),
        pickle.loads(pickle.dumps(buffer)),
        copy.deepcopy(buffer),
    ):
        assert again.verify
        np.asarray(again.observations)
        damage(again)
        with pytest.raises(CorruptDataError):
            np.asarray(again.observations)


def test_on_disk(tmp_path: Path) -> None:
    filled("delta", storage="mmap", path=tmp_path).close()
    buffer = filled("delta", n=0, storage="mmap", path=tmp_path)
    assert buffer.size() == 100
    np.asarray(buffer.observations)
    damage(buffer)
    with pytest.raises(CorruptDataError):
        np.asarray(buffer.observations)


def test_observations_that_were_saved_without_are_taken_as_they_are(tmp_path: Path) -> None:
    buffer = filled("delta")
    buffer.verify, buffer._stores[""].digests = False, None
    buffer.save(tmp_path / "buffer")
    again = CompressedReplayBuffer.load(tmp_path / "buffer", "cpu")
    assert not again.verify
    again.sample(10)


def test_rollouts_and_dicts_and_assignments() -> None:
    rollout = CompressedRolloutBuffer(20, IMAGES, ACTIONS, "cpu", n_envs=2, compression_method="none", verify=True)
    for number in range(3):
        rollout.reset()
        for step in itertools.islice(play(IMAGES, 2, action_space=ACTIONS, seed=number), 20):
            rollout.add(step.obs, step.action, step.reward, step.done, th.zeros(2), th.zeros(2))
        list(rollout.get(7))
    rollout._stores[""].frames.ring ^= 1
    with pytest.raises(CorruptDataError):
        list(rollout.get(7))

    space = spaces.Dict({"image": IMAGES, "vector": spaces.Box(-1, 1, (3,), np.float32)})
    buffer = CompressedDictReplayBuffer(100, space, ACTIONS, "cpu", verify=True)
    for step in itertools.islice(play(space, action_space=ACTIONS), 130):
        buffer.add(*step)
    buffer.sample(50)
    buffer.observations["vector"][3, 0] = np.ones(3, np.float32)
    assert (buffer.observations["vector"][3, 0] == 1).all()


def test_narrow_dtypes_are_compared_as_they_are_stored() -> None:
    space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    with pytest.warns(UserWarning, match="saturate"):
        buffer = CompressedReplayBuffer(50, space, ACTIONS, "cpu", dtypes=np.int8, verify=True, output_dtype="float")
    for step in itertools.islice(play(space, action_space=ACTIONS), 70):
        buffer.add(*step)
    buffer.sample(30)


def test_through_an_algorithm(tmp_path: Path) -> None:
    model = DQN(
        "MlpPolicy", "CartPole-v1", buffer_size=100, learning_starts=10, device="cpu",
        replay_buffer_class=CompressedReplayBuffer, replay_buffer_kwargs={"verify": True},
    )  # fmt: skip
    model.learn(200)
    assert model.replay_buffer is not None
    assert model.replay_buffer.verify  # type: ignore[attr-defined]
    model.save(tmp_path / "model")
    assert DQN.load(tmp_path / "model").replay_buffer.verify  # type: ignore[union-attr]
