"""Dones and timeouts in one byte per transition: SB3's values for whoever asks, and its arrays from then on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from tests.transitions import assert_same, play

SPACE, ACTIONS = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(3)
SLOTS, N_ENVS = 20, 2


def pair(count: int = 50) -> tuple[ReplayBuffer, CompressedReplayBuffer]:
    arguments = (SLOTS * N_ENVS, SPACE, ACTIONS, "cpu", N_ENVS)
    plain, ours = ReplayBuffer(*arguments), CompressedReplayBuffer(*arguments)
    for number, step in enumerate(itertools.islice(play(SPACE, N_ENVS, action_space=ACTIONS), count)):
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


def test_a_byte_is_enough_for_training() -> None:
    plain, ours = pair()
    assert_same_batches(plain, ours)
    assert ours._flags is not None
    assert not {"dones", "timeouts"} & vars(ours).keys()
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


def test_converting_a_buffer_leaves_its_flags_packed() -> None:
    plain, ours = pair()
    again = ours.to_sb3()
    chunks = list(ours.to_numpy())
    assert ours._flags is not None
    assert_same(again.timeouts, plain.timeouts)
    assert_same(chunks[0]["dones"], np.roll(plain.dones, -plain.pos, axis=0))
