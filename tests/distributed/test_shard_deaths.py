"""Shards that die. They are in this process."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.compressed import CompressedPrioritizedReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.distributed import ShardedReplayBuffer, shard_calls
from sb3_extra_buffers.errors import CorruptDataError, EmptyBufferError, WorkerError
from tests.compressed.test_interrupted import interrupted
from tests.distributed.test_sharded_buffer import N_ENVS, filled, make, steps
from tests.distributed.test_shards import REMOTE, transport_of


def collector(seed: int) -> Any:
    """A source of segments whose rewards are not those of other seeds."""
    small, history = make(CompressedReplayBuffer, size=80), steps(10_000, seed)

    def segment(n: int = 20) -> bytes:
        for _ in range(n):
            step = next(history)
            small.add(*step._replace(reward=np.full(N_ENVS, seed, np.float32)))
        return small.export_segment()  # type: ignore[no-any-return]

    return segment


def test_sampling_goes_on_when_a_shard_dies(caplog: pytest.LogCaptureFixture) -> None:
    buffer = make(size=2000, parts=4, **REMOTE, shards=2)
    segments = [collector(number) for number in range(4)]
    for _ in range(3):
        for number, segment in enumerate(segments):
            buffer.ingest_segment(segment(), part=number)
    assert set(np.unique(buffer.sample(256).rewards)) == {0, 1, 2, 3}
    transport_of(buffer).kill(1)  # with parts 2 and 3
    for _ in range(8):
        assert set(np.unique(buffer.sample(256).rewards)) <= {0, 1, 2, 3}
    assert set(np.unique(buffer.sample(256).rewards)) == {0, 1}
    assert "Shard 1 died, and 50.0% of all transitions are lost" in caplog.text
    assert buffer.shard_statistics == {"transitions_lost": 2 * 60 * N_ENVS, "fraction_lost": 0.5}
    # The collector goes on: what it leaves out of its segments is known.
    for number, segment in enumerate(segments):
        info = buffer.ingest_segment(segment(), part=number)
        assert info.continues == (number in (0, 1))
        buffer.ingest_segment(segment(), part=number)
    for _ in range(5):
        rewards = np.unique(buffer.sample(256).rewards)
    assert set(rewards) == {0, 1, 2, 3}
    assert [part.size() for part in buffer.parts] == [100, 100, 40, 40]
    buffer.check()


def sample_often(buffer: Any) -> None:
    for _ in range(10):
        buffer.sample(8)


def test_a_death_can_be_an_error() -> None:
    buffer = filled(**REMOTE, shards=2, on_loss="raise")
    buffer.sample(8)
    transport_of(buffer).kill(0)
    with pytest.raises(WorkerError, match=r"Shard 0 died, and .*% of all transitions are lost"):
        sample_often(buffer)
    assert buffer.sample(8).rewards.shape == (8, 1)


def test_a_shard_on_disk_is_restored(tmp_path: Any) -> None:
    np.random.seed(0)  # with 2,000 of 200 transitions, one in a hundred batches does not have them all
    buffer = filled((40, 60), **REMOTE, shards=2, path=tmp_path, prefetch=1)
    buffer._shards.ask_all("states")  # so that all has arrived
    for shard in transport_of(buffer).shards:
        for part in shard._buffers:
            part.flush()
    expected = {float(reward) for reward in buffer.sample(2000).rewards}
    transport_of(buffer).kill(0)
    assert {float(reward) for reward in buffer.sample(2000).rewards} <= expected
    assert buffer.shard_statistics["transitions_lost"] == 0
    assert {float(reward) for reward in buffer.sample(2000).rewards} == expected
    buffer.close()
    # And so is the whole buffer, when the learner has died.
    again = make(parts=2, **REMOTE, shards=2, path=tmp_path)
    assert {float(reward) for reward in again.sample(2000).rewards} == expected
    again.close()


@pytest.mark.parametrize("n_segments", [1, 2, 3, 6, 7, 20, 130, 190])
def test_a_young_shard_on_disk_loses_at_most_half(n_segments: int, tmp_path: Any) -> None:
    buffer = make(size=2000, parts=1, **REMOTE, shards=1, path=tmp_path, prefetch=1)
    segment = collector(0)
    for _ in range(n_segments):
        buffer.ingest_segment(segment(2))
    buffer._shards.ask_all("states")  # so that all has arrived
    transport_of(buffer).kill(0)
    buffer.sample(8)
    assert 0 <= buffer.shard_statistics["fraction_lost"] <= 0.5
    assert buffer.shard_statistics["transitions_lost"] < 64 * 2 * N_ENVS
    buffer.close()


def test_a_shard_may_die_while_another_is_asked_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    buffer = make(size=2000, parts=2, **REMOTE, shards=2, prefetch=1, path=tmp_path)
    transport, damaged = transport_of(buffer), bytearray(collector(1)())
    damaged[len(damaged) // 4] ^= 1
    buffer.ingest_segment(collector(0)(), part=0)
    buffer.ingest_segment(bytes(damaged), part=1)  # refused, so that the learner asks
    asked: list[int] = []
    call = transport.call

    def dying(shard: int, method: str, *arguments: Any) -> Any:
        if method == "states" and not asked:
            transport.kill(0)
        asked.extend([shard] if method == "states" else [])
        return call(shard, method, *arguments)

    monkeypatch.setattr(transport, "call", dying)
    assert set(np.unique(buffer.sample(64).rewards)) == {0}
    assert asked == [0, 1, 0]
    assert [part.size() for part in buffer.parts] == [20, 0]
    buffer.check()
    buffer.close()


def test_a_shard_that_always_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = filled(**REMOTE, shards=2)
    transport = transport_of(buffer)
    monkeypatch.setattr(transport, "restart", lambda shard: transport._waiting[shard].clear())
    transport.kill(1)
    with pytest.raises(WorkerError, match="died 5 times"):
        sample_often(buffer)


def test_nothing_is_sampled_from_a_shard_that_refuses_a_segment(caplog: pytest.LogCaptureFixture) -> None:
    buffer = make(size=2000, parts=2, **REMOTE, shards=2)
    segment = collector(1)
    segment()  # which has the references
    later = segment()
    buffer.ingest_segment(collector(0)(), part=0)
    buffer.ingest_segment(later, part=1)
    for _ in range(6):
        assert set(np.unique(buffer.sample(64).rewards)) <= {0, 1}
    sizes = [part.size() for part in buffer.parts]
    if sizes[1] == 0:
        assert "could not ingest a segment" in caplog.text
    buffer.check()


def test_random_deaths(tmp_path: Any) -> None:
    """Whatever dies, batches hold transitions that exist, and buffers stay consistent."""
    rng = np.random.default_rng(0)
    buffer = make(size=400, parts=3, **REMOTE, shards=3, buffer_class=CompressedPrioritizedReplayBuffer, path=tmp_path)
    segments = [collector(number) for number in range(3)]
    batches: list[Any] = []
    for _ in range(150):
        action = rng.integers(8)
        number = int(rng.integers(3))
        if action < 3:
            buffer.ingest_segment(segments[number](int(rng.integers(1, 30))), part=number)
        elif action < 6 and buffer.size():
            try:
                batch = buffer.sample(32)
            except EmptyBufferError:
                continue
            assert set(np.unique(batch.rewards)) <= {0, 1, 2}
            batches.append(batch.indices)
        elif action == 6 and batches:
            buffer.update_priorities(batches[int(rng.integers(len(batches)))], rng.uniform(0, 5, 32))
        else:
            transport_of(buffer).kill(number)
            for segment in range(3):
                buffer.ingest_segment(segments[segment](), part=segment)
    for segment in range(3):
        buffer.ingest_segment(segments[segment](), part=segment)
    for _ in range(5):
        buffer.sample(32)
    buffer.check()
    buffer.close()


def test_an_interrupted_segment_is_counted_if_it_was_sent() -> None:
    buffer = make(size=300, parts=2, **REMOTE, shards=2)
    segments, n_interrupted = [collector(number) for number in range(2)], 0
    for number in range(300):
        part = number % 2
        segment = segments[part](3)
        ingest = partial(buffer.ingest_segment, segment, part=part)
        if interrupted(ingest, 1 + number * 3 % 250):
            n_interrupted += 1
            ingest()  # which does nothing if it was sent
        known = [(part.pos, part.full) for part in buffer.parts]
        assert [state for states in buffer._shards.ask_all("states") for state in states] == known
        assert buffer.parts[part].pos == (number // 2 + 1) * 3 % (300 // 2 // N_ENVS)
    assert n_interrupted > 50
    assert set(np.unique(buffer.sample(256).rewards)) == {0, 1}
    buffer.check()


@pytest.fixture
def _with_ctrl_c() -> Iterator[None]:
    """Processes that are started in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_with_ctrl_c")
@pytest.mark.parametrize("on_disk", [False, True])
def test_ctrl_c_while_a_shard_is_started_again(on_disk: bool, tmp_path: Path) -> None:
    n_interrupted = 0
    for line in range(5, 300, 7):
        options = {"path": tmp_path / str(line)} if on_disk else {}
        buffer = make(size=2000, parts=1, **REMOTE, shards=1, prefetch=1, compression_method="delta", **options)
        segment = collector(0)
        buffer.ingest_segment(segment())
        buffer.sample(8)
        transport_of(buffer).kill(0)
        with contextlib.suppress(EmptyBufferError):
            n_interrupted += interrupted(partial(sample_often, buffer), line, delayed=True)
        with contextlib.suppress(EmptyBufferError):
            buffer.sample(8)  # which finds the shard dead if nothing has so far
        for _ in range(3):
            buffer.ingest_segment(segment())
        assert set(np.unique(buffer.sample(64).rewards)) == {0}
        (states,) = buffer._shards.ask_all("states")
        assert states == [(part.pos, part.full) for part in buffer.parts] == [(80 if on_disk else 60, False)]
        assert transport_of(buffer).shards[0]._n_refused == 0
        buffer.close()
    assert n_interrupted > 20


@pytest.mark.usefixtures("_with_ctrl_c")
def test_ctrl_c_does_not_reach_the_work_of_shards() -> None:
    """They work while the learner waits, and would not notice Ctrl-C in processes of their own."""
    n_interrupted = 0
    for line in range(3, 900, 19):
        buffer = make(size=2000, parts=2, **REMOTE, shards=2, buffer_class=CompressedPrioritizedReplayBuffer)
        segments = [collector(number) for number in range(2)]
        for number in range(4):
            buffer.ingest_segment(segments[number % 2](), part=number % 2)
        n_interrupted += interrupted(partial(buffer.sample, 8), line, delayed=True)
        states = [state for states in buffer._shards.ask_all("states") for state in states]
        assert states == [(part.pos, part.full) for part in buffer.parts] == [(40, False)] * 2
        assert set(np.unique(buffer.sample(64).rewards)) <= {0, 1}
        buffer.check()
    assert n_interrupted > 30


def test_steps_are_kept_if_their_shard_has_died_before_they_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_calls, "_MAX_UNCONFIRMED", 1)
    buffer = make(size=2000, parts=1, **REMOTE, shards=1, on_loss="raise", compression_method="delta")
    history = steps(200, 0)
    for step in islice(history, 32):
        buffer.add(*step)
    transport_of(buffer).kill(0)
    errors = 0
    for step in islice(history, 64):
        try:
            buffer.add(*step)
        except WorkerError:
            errors += 1
    assert errors == 1
    assert buffer.size() == 64
    assert buffer.shard_statistics["transitions_lost"] == 32 * N_ENVS
    buffer.check()


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_was_reset_does_not_come_back(on_disk: bool, tmp_path: Path) -> None:
    options = {"path": tmp_path / "shards"} if on_disk else {}
    buffer, segment = make(size=2000, parts=1, **REMOTE, shards=1, prefetch=1, **options), collector(0)
    buffer.ingest_segment(segment())
    buffer.save(tmp_path / "saved")
    buffer.reset()
    assert buffer.size() == 0
    buffer.ingest_segment(segment(2))
    buffer._shards.ask_all("states")  # so that it has arrived
    transport_of(buffer).kill(0)
    with contextlib.suppress(EmptyBufferError):
        buffer.sample(8)
    assert buffer.size() == (2 if on_disk else 0)
    assert buffer.shard_statistics["transitions_lost"] == (0 if on_disk else 2 * N_ENVS)
    buffer.close()


def test_segments_are_accepted_again_after_one_was_refused(tmp_path: Path) -> None:
    buffer = make(size=2000, parts=1, **REMOTE, shards=1, prefetch=1, compression_method="delta")
    segment = collector(0)
    buffer.ingest_segment(segment())
    good = segment()
    for place in range(100, len(good), 50):  # in bytes that only the shard reads
        damaged = bytearray(good)
        damaged[place] ^= 1
        with contextlib.suppress(CorruptDataError):
            buffer.ingest_segment(bytes(damaged))
            break
    for _ in range(3):
        buffer.sample(8)
    for _ in range(4):
        buffer.ingest_segment(segment())
    assert set(np.unique(buffer.sample(64).rewards)) == {0}
    assert transport_of(buffer).shards[0]._n_refused == 1
    buffer.save(tmp_path)
    assert ShardedReplayBuffer.load(tmp_path, "cpu", **REMOTE, shards=1).size() == buffer.size() == 100
    buffer.check()


def test_priorities_of_a_full_part_that_was_loaded_reach_their_transitions(tmp_path: Path) -> None:
    shard_of: Any = lambda buffer: transport_of(buffer).shards[0]  # noqa: E731
    options = {**REMOTE, "shards": 1, "prefetch": 1}
    first = make(size=40, parts=1, buffer_class=CompressedPrioritizedReplayBuffer, **options)
    segment = collector(0)
    for _ in range(3):
        first.ingest_segment(segment(9))
    first.save(tmp_path)
    buffer = ShardedReplayBuffer.load(tmp_path, "cpu", **options)
    n_slots, n_new = buffer.parts[0].buffer_size, 4
    pos = buffer.parts[0].pos
    assert buffer.parts[0].full
    before = shard_of(buffer)._generations(np.zeros(n_slots, int), np.arange(n_slots))
    buffer.ingest_segment(collector(1)(n_new))
    buffer._shards.ask_all("states")
    after = shard_of(buffer)._generations(np.zeros(n_slots, int), np.arange(n_slots))
    overwritten = (pos + np.arange(n_new)) % n_slots
    assert sorted(np.flatnonzero(before != after)) == sorted(overwritten)
