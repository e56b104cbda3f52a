"""Segments between buffers: the cases that long histories do not meet."""

from __future__ import annotations

import itertools
import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch as th
import xxhash
from gymnasium import spaces

from sb3_extra_buffers.compressed import (
    CompressedPrioritizedReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
)
from sb3_extra_buffers.errors import CorruptDataError, SegmentError
from sb3_extra_buffers.storage import record_copies
from sb3_extra_buffers.storage.pickling import unpickled
from tests.histories import worlds

SPACE, ACTIONS, N_ENVS = worlds.SPACES["stack"], spaces.Discrete(4), 2
FIELDS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


def make(
    slots: int = 100, space: Any = SPACE, cls: Any = CompressedReplayBuffer, n_envs: int = N_ENVS, **options: Any
) -> Any:
    return cls(slots * n_envs, space, ACTIONS, device="cpu", n_envs=n_envs, **options)


def fill(*buffers: Any, steps: int = 30, seed: int = 0, space: Any = SPACE) -> None:
    rng = np.random.default_rng(seed)
    for step in itertools.islice(worlds.transitions(space, ACTIONS, buffers[0].n_envs, rng, 50), steps):
        for buffer in buffers:
            buffer.add(*step)


def assert_equal(left: Any, right: Any, names: tuple[str, ...] = FIELDS) -> None:
    assert (left.pos, left.full) == (right.pos, right.full)
    for name in names:
        assert np.asarray(getattr(left, name)[:]).tobytes() == np.asarray(getattr(right, name)[:]).tobytes(), name


def test_a_sender_that_was_overwritten_exports_what_is_left() -> None:
    sender, receiver = make(20), make()
    fill(sender)
    receiver.ingest_segment(sender.export_segment())
    fill(sender, steps=57, seed=1)
    info = receiver.ingest_segment(sender.export_segment())
    assert (info.n_steps, info.continues) == (20, False)
    newest = np.asarray(sender.observations[:])[[*range(7, 20), *range(7)]]  # steps 67 to 86, in order
    np.testing.assert_array_equal(np.asarray(receiver.observations[20:40]), newest)
    assert ((receiver.timeouts + receiver.dones)[19] > 0).all()
    receiver.check()


def test_only_the_first_segment_holds_reference_frames() -> None:
    sender = make(compression_method="delta", frame_stack=4)
    fill(sender, steps=40)
    first = sender.export_segment()
    fill(sender, steps=40, seed=0)
    later = sender.export_segment()
    assert len(sender.export_segment()) < 3000
    assert len(later) < len(first)


def test_a_segment_without_the_one_before_says_so() -> None:
    sender, receiver = make(compression_method="zstd-dict", frame_stack=4), make()
    fill(sender, steps=90)
    sender.export_segment()
    fill(sender, steps=40)
    lost = sender.export_segment()
    with pytest.raises(CorruptDataError, match=r"restart=True"):
        receiver.ingest_segment(lost)
    assert receiver.size() == 0
    receiver.check()
    fill(sender, steps=10)
    info = receiver.ingest_segment(sender.export_segment(restart=True))
    assert (info.n_steps, info.sequence) == (10, 0)


def test_records_may_have_more_references_than_16_bits_can_number() -> None:
    n = (1 << 16) + 1
    contents = {xxhash.xxh3_128_hexdigest(content.data): content for content in np.arange(n)[:, None].view(np.uint8)}
    records = record_copies.Records(
        counts=np.array([n]),
        lengths=np.ones(n, dtype=np.int64),
        references=np.arange(1, n + 1),
        digests=list(contents),
        contents=contents,
        data=np.zeros(n, dtype=np.uint8),
    )
    received = record_copies.restored(unpickled(record_copies.state_of(records, set())), 1, 1, {})
    assert (received.references == records.references).all()


def test_everything_can_be_exported_again() -> None:
    sender, receiver = make(), make()
    fill(sender, steps=70)
    sender.export_segment()
    receiver.ingest_segment(sender.export_segment(everything=True))
    assert_equal(sender, receiver)


def test_buffers_can_be_merged() -> None:
    first, second, both = make(50), make(50), make()
    fill(first)
    fill(second, seed=5)
    for buffer in (first, second):
        info = both.ingest_segment(buffer.export_segment())
        assert not info.continues
    np.testing.assert_array_equal(
        np.asarray(both.observations[:60]), [*first.observations[:30], *second.observations[:30]]
    )
    assert ((both.timeouts + both.dones)[29] > 0).all()
    both.check()


def test_a_segment_larger_than_the_buffer_leaves_the_newest_steps() -> None:
    sender, receiver, expected = make(), make(13), make(13)
    fill(sender, expected, steps=60)
    receiver.ingest_segment(sender.export_segment())
    assert_equal(receiver, expected)


@pytest.mark.parametrize("receiving", [False, True])
def test_the_sender_may_share_the_next_observations_slot(receiving: bool) -> None:
    shared = {"optimize_memory_usage": True, "handle_timeout_termination": False}
    sender, receiver = (make(**options) for options in ((shared, {})[:: -1 if receiving else 1]))
    expected = make(**(shared if receiving else {"handle_timeout_termination": False}))
    rng, worlds_steps = np.random.default_rng(0), []
    for step in itertools.islice(worlds.transitions(SPACE, ACTIONS, N_ENVS, rng, 50), 30):
        worlds_steps.append(step)
    for step in worlds_steps:
        sender.add(*step)
        expected.add(*step)
    receiver.ingest_segment(sender.export_segment())
    np.testing.assert_array_equal(np.asarray(receiver.observations[:30]), np.asarray(expected.observations[:30]))
    np.testing.assert_array_equal(np.asarray(receiver.next_observations[29]), worlds_steps[-1].next_obs)


def test_a_lossy_elem_type_is_reported_once(tmp_path: Any) -> None:
    """When a buffer is created, not whenever it decodes a segment."""
    space = spaces.Box(-1, 1, (3,), np.float32)
    with pytest.warns(UserWarning, match="stored as float16"):
        sender = make(space=space, dtypes="float16", storage="mmap", path=tmp_path / "sender")
    with pytest.warns(UserWarning, match="stored as float16"):
        receiver = make(space=space, dtypes="float16")
    fill(sender, space=space)
    receiver.ingest_segment(sender.export_segment())
    assert_equal(sender, receiver)


def test_priorities_travel_if_asked_for() -> None:
    sender, plain = (make(cls=CompressedPrioritizedReplayBuffer, alpha=0.5) for _ in range(2))
    other = make(cls=CompressedPrioritizedReplayBuffer, alpha=1.0)
    fill(sender)
    sender.update_priorities(np.arange(60), np.arange(60.0))
    plain.ingest_segment(sender.export_segment())
    assert (plain._tree[np.arange(60)] == 1.0).all()
    segment = sender.export_segment(everything=True, priorities=True)
    other.ingest_segment(segment)
    np.testing.assert_allclose(other._tree[np.arange(60)], np.arange(60.0) + 1e-6)
    assert other.max_priority == pytest.approx(59, rel=1e-6)
    host = make()
    host.ingest_segment(segment)
    assert host.size() == 30


def test_a_rollout_travels_with_its_advantages() -> None:
    sender, receiver = (CompressedRolloutBuffer(16, SPACE, ACTIONS, device="cpu", n_envs=N_ENVS) for _ in range(2))
    for buffer in (sender, receiver):
        buffer.reset()
    rng = np.random.default_rng(0)
    for step in itertools.islice(worlds.transitions(SPACE, ACTIONS, N_ENVS, rng, 50), 16):
        sender.add(step.obs, step.action, step.reward, step.done, th.ones(N_ENVS), th.zeros(N_ENVS))
    sender.compute_returns_and_advantage(th.ones(N_ENVS), np.zeros(N_ENVS))
    segment = sender.export_segment()
    receiver.ingest_segment(segment)
    assert_equal(sender, receiver, ("observations", *CompressedRolloutBuffer._saved_fields))
    with pytest.raises(SegmentError, match="room for 0"):
        receiver.ingest_segment(sender.export_segment(everything=True))
    next(iter(sender.get(4)))
    with pytest.raises(SegmentError, match=r"before you call get\(\)"):
        sender.export_segment()
    with pytest.raises(SegmentError, match="rollout buffer"):
        make().ingest_segment(segment)


def has_ended(buffer: Any, slot: int) -> bool:
    return bool(((buffer.timeouts + buffer.dones)[slot] > 0).all())


def test_steps_that_were_added_in_between_are_not_continued() -> None:
    sender, receiver = make(), make()
    fill(sender, steps=10)
    receiver.ingest_segment(sender.export_segment())
    fill(receiver, steps=5, seed=9)
    fill(sender, steps=10, seed=3)
    assert not receiver.ingest_segment(sender.export_segment()).continues
    assert has_ended(receiver, 14)


def test_an_empty_segment_of_another_sender_ends_episodes_too() -> None:
    first, second, receiver = make(), make(), make()
    fill(first, steps=10)
    receiver.ingest_segment(first.export_segment())
    assert not receiver.ingest_segment(second.export_segment()).continues
    fill(second, steps=10, seed=1)
    assert receiver.ingest_segment(second.export_segment()).continues
    assert has_ended(receiver, 9)


def test_a_gap_ends_episodes_where_it_overwrites_next_observations() -> None:
    options = {"optimize_memory_usage": True, "handle_timeout_termination": False}
    first, second, receiver = make(**options), make(**options), make(**options)
    fill(first, steps=7)
    fill(second, steps=10, seed=1)
    receiver.ingest_segment(first.export_segment())
    assert not receiver.dones[6].any()
    receiver.ingest_segment(second.export_segment())
    assert receiver._get_samples(np.full(20, 6)).dones.min() == 1


def rollout(steps: int = 0) -> Any:
    buffer = CompressedRolloutBuffer(16, SPACE, ACTIONS, device="cpu", n_envs=N_ENVS)
    add_to_rollout(buffer, steps)
    return buffer


def add_to_rollout(buffer: Any, steps: int) -> None:
    rng = np.random.default_rng(0)
    for step in itertools.islice(worlds.transitions(SPACE, ACTIONS, N_ENVS, rng, 50), steps):
        buffer.add(step.obs, step.action, step.reward, step.done, th.ones(N_ENVS), th.zeros(N_ENVS))


def test_an_empty_segment_of_another_sender_does_not_continue_a_rollout() -> None:
    receiver = rollout()
    receiver.ingest_segment(rollout(5).export_segment())
    with pytest.raises(SegmentError, match="does not continue"):
        receiver.ingest_segment(rollout().export_segment())


def test_steps_that_were_dropped_before_they_were_exported_are_a_gap() -> None:
    sender, receiver = rollout(5), rollout()
    receiver.ingest_segment(sender.export_segment())
    add_to_rollout(sender, 3)
    sender.reset()
    add_to_rollout(sender, 5)
    with pytest.raises(SegmentError, match="does not continue"):
        receiver.ingest_segment(sender.export_segment())


def test_whole_rollouts_continue_each_other() -> None:
    sender, receiver = rollout(16), rollout()
    for _ in range(3):
        receiver.ingest_segment(sender.export_segment())
        assert_equal(sender, receiver, ("observations", "rewards"))
        for buffer in (sender, receiver):
            buffer.reset()
        add_to_rollout(sender, 7)
        assert receiver.ingest_segment(sender.export_segment()).continues
        add_to_rollout(sender, 9)


def test_ctrl_c_does_not_let_a_segment_in_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = make(), make()
    fill(sender, steps=10)
    segment = sender.export_segment()
    place_rows = receiver._place_rows

    def interrupted(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        place_rows(*arguments)

    monkeypatch.setattr(receiver, "_place_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        receiver.ingest_segment(segment)
    assert receiver.ingest_segment(segment).n_steps == 0
    assert_equal(sender, receiver)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("priority", [1e300, np.inf, np.nan, 0.0, -1.0])
def test_priorities_that_cannot_be_drawn_by(alpha: float, priority: float) -> None:
    sender, receiver = (
        make(cls=CompressedPrioritizedReplayBuffer, alpha=0.5),
        make(cls=CompressedPrioritizedReplayBuffer, alpha=alpha),
    )
    fill(sender)
    sender._tree._nodes[:60] = priority
    with pytest.raises(CorruptDataError, match="priorities"):
        receiver.ingest_segment(sender.export_segment(priorities=True))
    assert (receiver.size(), receiver.max_priority, receiver._tree.total) == (0, 1.0, 0.0)


@pytest.mark.parametrize("version", [-1, np.int64(3), None])
def test_any_number_is_a_policy_version(version: Any) -> None:
    assert make().ingest_segment(make().export_segment(policy_version=version)).policy_version == version


def test_a_buffer_on_disk_flushes_with_its_lock_held(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread could add while the state is written."""
    buffer, is_held = make(storage="mmap", path=tmp_path / "buffer"), []

    def try_lock() -> None:
        got_it = buffer._lock.held.acquire(timeout=0.05)
        is_held.append(not got_it)
        if got_it:
            buffer._lock.held.release()

    def before_adding(_: Any) -> None:
        thread = threading.Thread(target=try_lock)
        thread.start()
        thread.join()

    monkeypatch.setattr(buffer._folder, "before_adding", before_adding)
    fill(buffer, steps=1)
    buffer.ingest_segment(buffer.export_segment())
    assert is_held == [True] * 3
    buffer.close()
