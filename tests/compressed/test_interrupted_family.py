"""Interrupted steps of HER and prioritized buffers, whose own arrays must agree with what is stored, and rollouts.

With one slot per environment the position never moves, so it cannot tell whether a step was stored.
"""

from __future__ import annotations

import itertools
import signal
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.compressed import (
    CompressedDictRolloutBuffer,
    CompressedHerReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    CompressedPrioritizedSequenceReplayBuffer,
    CompressedRolloutBuffer,
)
from tests.compressed.test_interrupted import interrupted
from tests.persistence.buffers import ACTIONS, IMAGES, N_ENVS, goal_env, make, steps_for
from tests.transitions import assert_same

LINES = 2000


def interrupted_anywhere(make: Any, check: Any) -> tuple[int, int]:
    """Interrupts the second step once at each line, and counts how often it was stored."""
    stored = 0
    for line in range(1, LINES):
        buffer: ReplayBuffer = make()
        old, new = ((*step[:5], [{"step": number}] * N_ENVS) for number, step in enumerate(steps_for(buffer, 2)))
        old[3][:], new[3][:] = 1.0, 2.0
        buffer.add(*old)
        prepared = check(buffer)
        if not interrupted(lambda buffer=buffer, new=new: buffer.add(*new), line):
            return stored, line - 1 - stored
        is_stored = bool(buffer.rewards[0, 0] == 2.0)
        stored += is_stored
        prepared(is_stored)
    raise AssertionError("the step takes more lines than this test interrupts")


def test_a_priority_belongs_to_the_step_that_is_stored() -> None:
    def make() -> CompressedPrioritizedReplayBuffer:
        return CompressedPrioritizedReplayBuffer(
            N_ENVS, IMAGES, ACTIONS, "cpu", N_ENVS, compression_method="none", frame_stack=None
        )

    def check(buffer: CompressedPrioritizedReplayBuffer) -> Any:
        buffer.update_priorities(np.arange(N_ENVS), np.full(N_ENVS, 0.25))
        old = buffer._tree[np.arange(N_ENVS)].copy()

        def after(is_stored: bool) -> None:
            assert (buffer._tree[np.arange(N_ENVS)] == (1.0 if is_stored else old)).all()

        return after

    stored, not_stored = interrupted_anywhere(make, check)
    assert stored > 5
    assert not_stored > 5


def test_infos_belong_to_the_step_that_is_stored() -> None:
    env = goal_env()

    def make() -> CompressedHerReplayBuffer:
        return CompressedHerReplayBuffer(
            N_ENVS, env.observation_space, env.action_space, env, "cpu", N_ENVS, copy_info_dict=True
        )

    def check(buffer: CompressedHerReplayBuffer) -> Any:
        def after(is_stored: bool) -> None:
            assert [info["step"] for info in buffer.infos[0]] == [int(is_stored)] * N_ENVS

        return after

    stored, not_stored = interrupted_anywhere(make, check)
    assert stored > 5
    assert not_stored > 5


def test_her_starts_a_new_episode_after_an_interrupted_end() -> None:
    env = goal_env()
    arguments: Any = 20 * N_ENVS, env.observation_space, env.action_space, env, "cpu", N_ENVS
    steps = [
        (*step, np.full(N_ENVS, number % 4 == 3), infos)
        for number, (*step, _, infos) in enumerate(steps_for(CompressedHerReplayBuffer(*arguments), 12))
    ]
    expected = CompressedHerReplayBuffer(*arguments)
    for step in steps:
        expected.add(*step)
    for line in range(1, LINES):
        buffer = CompressedHerReplayBuffer(*arguments)
        for step in steps[:7]:
            buffer.add(*step)
        is_through = not interrupted(lambda buffer=buffer: buffer.add(*steps[7]), line)
        for step in steps[buffer.pos :]:
            buffer.add(*step)
        for name in ("ep_start", "ep_length", "_current_ep_start", "dones"):
            assert (getattr(buffer, name) == getattr(expected, name)).all(), (name, line)
        if is_through:
            break
    assert is_through


@pytest.mark.parametrize("space", [IMAGES, spaces.Dict({"left": IMAGES, "right": IMAGES})], ids=["images", "Dict"])
@pytest.mark.parametrize("number", range(6))
def test_an_interrupted_first_batch_leaves_a_rollout_that_can_be_read(space: spaces.Space, number: int) -> None:
    """Ctrl-C while SB3 flattens the arrays one after the other."""

    def rollout() -> Any:
        is_dict = isinstance(space, spaces.Dict)
        cls = CompressedDictRolloutBuffer if is_dict else CompressedRolloutBuffer
        buffer = cls(4, space, ACTIONS, "cpu", n_envs=N_ENVS)
        rng = np.random.default_rng(0)
        for _ in range(4):
            images = rng.integers(0, 255, (N_ENVS, *IMAGES.shape), np.uint8)
            obs = {"left": images, "right": images} if is_dict else images
            values = th.from_numpy(rng.random(N_ENVS, np.float32))
            buffer.add(obs, np.zeros(N_ENVS), np.zeros(N_ENVS), np.zeros(N_ENVS), values, values)
        return buffer

    buffer, expected = rollout(), rollout()
    flatten, calls = buffer.swap_and_flatten, itertools.count()

    def interrupted_flatten(array: Any) -> Any:
        if next(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return flatten(array)

    buffer.swap_and_flatten = interrupted_flatten
    with pytest.raises(KeyboardInterrupt):
        next(buffer.get(3))
    batches = []
    for one in (buffer, expected):
        np.random.seed(0)
        batches.append([batch._asdict() for batch in one.get(3)])
    for batch, same in zip(*batches, strict=True):
        assert_same(batch, same)


@pytest.mark.parametrize("cls", [CompressedPrioritizedReplayBuffer, CompressedPrioritizedSequenceReplayBuffer])
def test_an_interrupted_reset_leaves_no_priorities_behind(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer: Any = make(cls.__name__)
    for step in steps_for(buffer, 9):
        buffer.add(*step)
    clear = buffer._tree.clear

    def interrupted_clear() -> None:
        signal.raise_signal(signal.SIGINT)
        clear()

    monkeypatch.setattr(buffer._tree, "clear", interrupted_clear)
    with pytest.raises(KeyboardInterrupt):
        buffer.reset()
    assert (buffer.size(), buffer._tree.total) == (0, 0)
