"""Dones and timeouts in one byte per transition, actions in a byte each: SB3's values, and its arrays on access."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.compressed.conversion import _episodes
from tests.transitions import assert_same, play

SPACE, ACTIONS = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(3)
SLOTS, N_ENVS = 20, 2


def pair(count: int = 50, actions: spaces.Space = ACTIONS) -> tuple[ReplayBuffer, CompressedReplayBuffer]:
    arguments = (SLOTS * N_ENVS, SPACE, actions, "cpu", N_ENVS)
    plain, ours = ReplayBuffer(*arguments), CompressedReplayBuffer(*arguments)
    for number, step in enumerate(itertools.islice(play(SPACE, N_ENVS, action_space=actions), count)):
        done = np.array([number % 3 == 0, number % 5 == 0])
        infos = [{"TimeLimit.truncated": bool(ended and number % 2)} for ended in done]
        for buffer in (plain, ours):
            buffer.add(*step[:4], done, infos)
    return plain, ours


def assert_same_batches(plain: ReplayBuffer, ours: ReplayBuffer) -> None:
    batches = []
    for buffer in (plain, ours):
        np.random.seed(3)
        batches.append(buffer.sample(64))
    assert_same(batches[0].dones.numpy(), batches[1].dones.numpy())
    assert_same(batches[0].rewards.numpy(), batches[1].rewards.numpy())
    assert_same(batches[0].actions.numpy(), batches[1].actions.numpy())


def test_a_byte_is_enough_for_training() -> None:
    plain, ours = pair()
    assert_same_batches(plain, ours)
    assert ours._flags is not None
    assert ours._action_bytes is not None
    assert not {"dones", "timeouts", "actions"} & vars(ours).keys()
    usage = ours.memory_usage()
    assert usage.raw_equivalent == sum(
        getattr(plain, name).nbytes
        for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
    )


def test_whoever_asks_gets_sb3s_arrays_and_may_change_them() -> None:
    plain, ours = pair()
    for name in ("dones", "timeouts"):
        assert type(getattr(ours, name)) is np.ndarray
        assert_same(getattr(plain, name), getattr(ours, name))
    assert ours.dones is ours.dones
    row = ours.dones[4]
    row[:] = plain.dones[4] = [0.5, 2]
    ours.timeouts[:, 0] = plain.timeouts[:, 0] = 1
    assert_same_batches(plain, ours)
    for buffer in (plain, ours):
        buffer.timeouts = np.zeros_like(buffer.dones)
    assert_same_batches(plain, ours)


@pytest.mark.parametrize(
    ("value", "is_timeout"), [(0.25, False), (-0.0, False), (np.nan, False), (2, False), (0.25, True), (np.nan, True)]
)
def test_values_other_than_0_and_1_are_kept(value: float, is_timeout: bool) -> None:
    plain, ours = pair(10)
    step = next(play(SPACE, N_ENVS, action_space=ACTIONS))
    for buffer in (plain, ours):
        done: Any = [1.0, 0.0] if is_timeout else [value, 1.0]
        timeouts = [value, 0] if is_timeout else [0, 1]
        buffer.add(*step[:4], np.array(done), [{"TimeLimit.truncated": timeout} for timeout in timeouts])
    assert plain.dones.tobytes() == ours.dones.tobytes()
    assert plain.timeouts.tobytes() == ours.timeouts.tobytes()
    assert_same_batches(plain, ours)


@pytest.mark.parametrize("is_odd", [False, True])
def test_saved_and_loaded(is_odd: bool, tmp_path: Path) -> None:
    plain, ours = pair()
    if is_odd:
        plain.dones[3, 1] = ours.dones[3, 1] = 0.5
    ours.save(tmp_path / "buffer")
    assert (ours._flags is None) is is_odd
    loaded = CompressedReplayBuffer.load(tmp_path / "buffer", "cpu")
    assert (loaded._flags is None) is is_odd
    assert_same_batches(plain, loaded)
    assert_same(plain.timeouts, loaded.timeouts)
    assert_same(plain.dones, loaded.dones)


def test_another_thread_may_unpack_them_at_any_moment() -> None:
    """That adds attributes to the buffer, and a dict that grows cannot be iterated over."""
    _, ours = pair()

    class ThreadSwitch:
        @property
        def __class__(self) -> type:  # asked for by isinstance() in memory_usage()
            ours.dones[0]
            return object

    vars(ours)["switch"] = ThreadSwitch()
    assert ours.memory_usage().transitions == SLOTS * N_ENVS
    assert ours._flags is None


def test_converting_a_buffer_leaves_its_fields_packed() -> None:
    plain, ours = pair()
    again = ours.to_sb3()
    chunks = list(ours.to_numpy())
    episodes = list(_episodes(ours))
    ours.export_segment()
    assert ours._flags is not None
    assert ours._action_bytes is not None
    assert_same(again.timeouts, plain.timeouts)
    assert_same(again.actions, plain.actions)
    for name in ("dones", "actions"):
        assert_same(chunks[0][name], np.roll(getattr(plain, name), -plain.pos, axis=0))
    assert sum(len(episode.actions) for episode in episodes) == SLOTS * N_ENVS
    assert {episode.actions.dtype for episode in episodes} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("space", "is_packed"),
    [
        (spaces.Discrete(256), True),
        (spaces.Discrete(257), False),
        (spaces.Discrete(200, start=56), True),
        (spaces.Discrete(200, start=57), False),
        (spaces.Discrete(3, start=-1), False),
        (spaces.MultiDiscrete([2, 256, 3]), True),
        (spaces.MultiDiscrete([2, 257]), False),
        (spaces.MultiDiscrete([2, 3], dtype=np.int32), True),
        (spaces.MultiBinary(3), False),
        (spaces.Box(0, 1, (2,), np.int64), False),
        (spaces.Box(-1, 1, (2,), np.float32), False),
    ],
    ids=str,
)
def test_actions_that_fit_are_bytes(space: spaces.Space, is_packed: bool, tmp_path: Path) -> None:
    plain, ours = pair(actions=space)
    assert (ours._action_bytes is not None) is is_packed
    raw = sum(array.nbytes for array in vars(plain).values() if isinstance(array, np.ndarray))
    assert ours.memory_usage().raw_equivalent == raw
    ours.save(tmp_path / "buffer")
    for buffer in (ours, CompressedReplayBuffer.load(tmp_path / "buffer", "cpu"), pickle.loads(pickle.dumps(ours))):
        assert_same_batches(plain, buffer)
        assert (buffer._action_bytes is not None) is is_packed
        assert_same(plain.actions, buffer.actions)
        assert buffer.actions is buffer.actions
        assert buffer._action_bytes is None
        assert_same_batches(plain, buffer)


def test_actions_may_be_changed_and_replaced() -> None:
    plain, ours = pair()
    row = ours.actions[4]
    row[:] = plain.actions[4] = [[700], [-1]]
    assert_same_batches(plain, ours)
    plain, ours = pair()
    for buffer in (plain, ours):
        buffer.actions = np.full_like(plain.actions, 1 << 50)
    assert_same_batches(plain, ours)


@pytest.mark.parametrize("value", [256, -1, 257, 1 << 62, 255, 3.7, True])
@pytest.mark.parametrize("by", ["add", "segment"])
def test_actions_outside_their_space_are_kept(value: Any, by: str) -> None:
    plain, ours = pair(10)
    step = next(play(SPACE, N_ENVS, action_space=ACTIONS))
    for buffer in (plain, ours):
        buffer.add(*step[:2], np.array([value, type(value)(1)]), *step[3:])
    if by == "segment":
        segment, (_, ours) = ours.export_segment(), pair(0)
        ours.ingest_segment(segment)
    assert (ours._action_bytes is None) is (value not in (255, 3.7, True))
    assert_same_batches(plain, ours)
    assert_same(plain.actions, ours.actions)


def test_a_step_that_fails_leaves_actions_as_they_were() -> None:
    plain, ours = pair(10)
    step = next(play(SPACE, N_ENVS, action_space=ACTIONS))
    with pytest.raises(ValueError, match=r"broadcast|reshape"):
        ours.add(*step[:2], np.array([256, 256, 256]), *step[3:])
    with pytest.raises(ValueError, match=r"shape"):
        ours.add(step[0][:, :1], step[1], np.array([256, 256]), *step[3:])
    assert_same_batches(plain, ours)
    assert_same(plain.actions, ours.actions)
