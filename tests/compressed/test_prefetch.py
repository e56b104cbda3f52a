"""``prefetch=True``: right batches, drawn one call earlier, repeatable."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.errors import CorruptDataError, EmptyBufferError

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


def test_saving_does_not_wait_for_a_batch_that_waits_for_it(tmp_path: Path) -> None:
    buffer = make(True)
    assert buffer._prefetcher is not None

    def save() -> None:
        with buffer._lock.held:  # so that the batch is still to be read when the buffer is saved
            buffer._prefetcher._ahead[8] = ReplayBuffer.sample(buffer, 8)
            buffer.save(tmp_path / "saved")

    thread = threading.Thread(target=save, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "Both wait for each other."
    assert CompressedReplayBuffer.load(tmp_path / "saved").size() == buffer.size()


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
    read = CompressedReplayBuffer._samples_at

    def late(self: CompressedReplayBuffer, *arguments: Any) -> Any:
        time.sleep(0.05)
        return read(self, *arguments)

    monkeypatch.setattr(CompressedReplayBuffer, "_samples_at", late)
    test_adding_between_two_samples_does_not_disturb_the_batch_ahead()


def test_batch_sizes_do_not_mix() -> None:
    buffer = make(True)
    assert [len(buffer.sample(size).rewards) for size in (4, 8, 4, 8, 16)] == [4, 8, 4, 8, 16]


def test_a_copy_starts_anew() -> None:
    buffer = make(True)
    buffer.sample(8)
    twin = pickle.loads(pickle.dumps(buffer))
    np.random.seed(3)
    batch = twin.sample(8)
    np.random.seed(3)
    assert_equal(batch, make(False).sample(8))


def sampled_after(change: Callable[[CompressedReplayBuffer], object]) -> list[Any]:
    """The batches that buffers with and without prefetching give after the same change, drawn under the same seed."""
    batches = []
    for prefetch in (True, False):
        buffer = make(prefetch)
        buffer.sample(8)
        change(buffer)
        np.random.seed(4)
        batches.append(buffer.sample(8))
    return batches


def reset_and_fill(buffer: CompressedReplayBuffer) -> None:
    buffer.reset()
    fill(buffer, 20, seed=7)


def assign_observations(buffer: CompressedReplayBuffer) -> None:
    buffer.observations[:, 0] = np.full(SPACE.shape, 7, np.uint8)


def assign_next_observations(buffer: CompressedReplayBuffer) -> None:
    for slot in range(len(buffer.next_observations)):
        buffer.next_observations[slot] = np.full((2, *SPACE.shape), slot, np.uint8)


def move_there_and_back(buffer: CompressedReplayBuffer) -> None:
    buffer.device = th.device("meta")
    buffer.sample(8)
    buffer.device = th.device("cpu")


@pytest.mark.parametrize(
    "change",
    [reset_and_fill, assign_observations, assign_next_observations, move_there_and_back, CompressedReplayBuffer.close],
)
def test_nothing_is_served_from_before_a_change(change: Callable[[CompressedReplayBuffer], object]) -> None:
    assert_equal(*sampled_after(change))


def test_an_empty_buffer_has_no_batch_ahead() -> None:
    buffer = make(True)
    buffer.sample(8)
    buffer.reset()
    with pytest.raises(EmptyBufferError):
        buffer.sample(8)


def test_batches_go_where_the_buffer_was_told_last() -> None:
    buffer = make(True)
    buffer.sample(8)
    buffer.device = th.device("meta")
    assert buffer.sample(8).observations.device.type == "meta"


def test_assigning_waits_for_what_is_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = CompressedReplayBuffer._samples_at
    reading = []

    def slow(self: CompressedReplayBuffer, *arguments: Any) -> Any:
        reading.append(True)
        time.sleep(0.05)
        batch = read(self, *arguments)
        reading.pop()
        return batch

    buffer = make(True)
    monkeypatch.setattr(CompressedReplayBuffer, "_samples_at", slow)
    buffer.sample(8)
    with buffer.observations.guard():
        assert not reading


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_a_copy_has_a_prefetcher_of_its_own_for_all_its_arrays(copies: Callable[[Any], Any]) -> None:
    buffer = make(True)
    buffer.sample(8)
    other = copies(buffer)
    other.sample(8)
    assign_observations(other)
    reference = make(False)
    assign_observations(reference)
    np.random.seed(5)
    batch = other.sample(8)
    np.random.seed(5)
    assert_equal(batch, reference.sample(8))
    assert buffer._prefetcher is not other._prefetcher


def test_an_error_in_the_background_is_raised_by_the_batch_that_it_belongs_to(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make(True)
    buffer.sample(8)
    buffer._prefetcher.wait()
    read = CompressedReplayBuffer._samples_at

    def broken(self: CompressedReplayBuffer, *arguments: Any) -> Any:
        raise CorruptDataError("one bad batch")

    monkeypatch.setattr(CompressedReplayBuffer, "_samples_at", broken)
    buffer.sample(8)  # read before
    buffer._prefetcher.wait()
    monkeypatch.setattr(CompressedReplayBuffer, "_samples_at", read)
    with pytest.raises(CorruptDataError, match="one bad batch"):
        buffer.sample(8)
    fill(buffer, 3)
    assert len(buffer.sample(8).rewards) == 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("seconds", [0.0, 0.1], ids=["idle", "in the middle of a read"])
def test_a_forked_child_goes_on(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, plain = make(True), make(False)
    samples_at = buffer._samples_at

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return samples_at(*arguments)

    monkeypatch.setattr(buffer, "_samples_at", slow)
    np.random.seed(6)
    expected = [plain.sample(8) for _ in range(4)]
    np.random.seed(6)
    assert_equal(buffer.sample(8), expected[0])
    child = os.fork()
    if child == 0:
        os._exit(_child_works(buffer))
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("The child waits for ever.")
        time.sleep(0.01)
    assert ended[1] == 0
    assert_equal(buffer.sample(8), expected[1])  # as if nothing had happened


def _child_works(buffer: CompressedReplayBuffer) -> int:
    try:
        fill(buffer, 3)
        return int(not all(len(buffer.sample(8).rewards) == 8 for _ in range(3)))
    except BaseException:
        return 1
