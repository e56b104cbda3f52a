"""``prefetch=True``: right batches, drawn one call earlier, repeatable."""

from __future__ import annotations

import pickle
import time
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.compressed.prefetch import Prefetcher

SPACE, ACTIONS = spaces.Box(0, 255, (4, 20, 20), np.uint8), spaces.Discrete(3)


def fill(buffer: ReplayBuffer, steps: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 256, (steps + 5, 2, 20, 20), dtype=np.uint8)
    for t in range(steps):
        obs, next_obs = (frames[i : i + 4].swapaxes(0, 1) for i in (t, t + 1))
        buffer.add(obs, next_obs, rng.integers(0, 3, (2, 1)), rng.random(2), rng.random(2) < 0.1, [{}, {}])


def make(prefetch: bool) -> CompressedReplayBuffer:
    buffer = CompressedReplayBuffer(200, SPACE, ACTIONS, "cpu", n_envs=2, prefetch=prefetch)
    fill(buffer, 150)
    return buffer


def assert_equal(one: object, other: object) -> None:
    for left, right in zip(one, other, strict=True):  # type: ignore[call-overload]
        assert left is right is None or th.equal(left, right)


def test_batches_are_those_that_sb3_draws_in_the_same_order() -> None:
    ours, theirs = make(True), ReplayBuffer(200, SPACE, ACTIONS, "cpu", n_envs=2)
    fill(theirs, 150)
    np.random.seed(1)
    expected = [theirs.sample(16) for _ in range(6)]
    np.random.seed(1)
    for batch in expected[:5]:
        assert_equal(ours.sample(16), batch)


def test_adding_between_two_samples_does_not_disturb_the_batch_ahead() -> None:
    ours, theirs = make(True), make(False)
    np.random.seed(2)
    first, ahead = theirs.sample(16), theirs.sample(16)
    np.random.seed(2)
    assert_equal(ours.sample(16), first)
    fill(ours, 20, seed=9)  # overwrites slots; what was drawn before was read before
    assert_equal(ours.sample(16), ahead)


def test_a_thread_that_wakes_up_late_still_reads_what_was_there_when_it_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = Prefetcher._read

    def late(self: Prefetcher, *arguments: Any) -> Any:
        time.sleep(0.05)
        return read(self, *arguments)

    monkeypatch.setattr(Prefetcher, "_read", late)
    test_adding_between_two_samples_does_not_disturb_the_batch_ahead()


def test_batch_sizes_do_not_mix() -> None:
    buffer = make(True)
    assert [len(buffer.sample(size).rewards) for size in (4, 8, 4, 8, 16)] == [4, 8, 4, 8, 16]


def test_a_copy_starts_anew() -> None:
    buffer = make(True)
    buffer.sample(8)
    copy = pickle.loads(pickle.dumps(buffer))
    np.random.seed(3)
    batch = copy.sample(8)
    np.random.seed(3)
    assert_equal(batch, make(False).sample(8))
