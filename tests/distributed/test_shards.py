"""A buffer whose parts are in shards is sampled like one whose parts are here. The shards are in this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3 import DQN
from stable_baselines3.common.logger import Logger

from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedNStepReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    CompressedReplayBuffer,
    PrioritizedDQN,
)
from sb3_extra_buffers.distributed import ShardedReplayBuffer, distributed
from sb3_extra_buffers.distributed.shard_transport import ShardDied
from sb3_extra_buffers.distributed.stamps import unstamped
from sb3_extra_buffers.errors import ConfigurationError, EmptyBufferError, SegmentError
from sb3_extra_buffers.storage import shared_memory
from tests.distributed.test_sharded_buffer import DICT, IMAGES, N_ENVS, VECTORS, chi_square, filled, make, steps
from tests.transitions import assert_same

REMOTE: dict[str, Any] = {"placement": "shards", "in_process": True}


FIELDS = ("observations", "next_observations")


def transport_of(buffer: Any) -> Any:
    return buffer._shards._transport


def assert_same_batches(single: Any, sharded: Any, history: Iterable[Any], is_due: Callable[[int], bool]) -> None:
    """Add the same steps to both, and compare batches after some of them. Priorities are updated."""
    for number, step in enumerate(history):
        single.add(*step)
        sharded.add(*step)
        if is_due(number):
            batches = []
            for buffer in (single, sharded):
                np.random.seed(number)
                batch = buffer.sample(32)
                if hasattr(batch, "indices"):
                    buffer.update_priorities(batch.indices, np.linspace(-1, 2, 32))
                    batch = batch._replace(indices=unstamped(batch.indices)[0])
                batches.append(tuple(batch))
            assert_same(batches[0], batches[1])


def move_away(buffer: Any, shard: int) -> None:
    """As if the shard were on another machine: it cannot write to the learner's memory."""
    transport_of(buffer).shards[shard]._attached = lambda address: None


@pytest.mark.parametrize(
    ("cls", "space", "options"),
    [
        (CompressedReplayBuffer, IMAGES, {}),
        (CompressedReplayBuffer, IMAGES, {"compression_method": "gzip"}),
        (CompressedReplayBuffer, VECTORS, {}),
        (CompressedReplayBuffer, IMAGES, {"optimize_memory_usage": True, "handle_timeout_termination": False}),
        (CompressedDictReplayBuffer, DICT, {}),
        (CompressedNStepReplayBuffer, IMAGES, {"n_steps": 3}),
        (CompressedPrioritizedReplayBuffer, IMAGES, {"alpha": 0.7}),
        (CompressedPrioritizedReplayBuffer, VECTORS, {"alpha": 0.7, "n_steps": 3}),
    ],
    ids=str,
)
def test_one_shard_is_the_class_itself(cls: Any, space: Any, options: dict[str, Any]) -> None:
    single = make(cls, space=space, **options)
    sharded = make(space=space, buffer_class=cls, shards=1, prefetch=1, **REMOTE, **options)
    assert_same_batches(single, sharded, steps(400, space=space), lambda number: number % 30 == 29)
    assert (single.pos, single.full, single.size()) == (sharded.pos, sharded.full, sharded.size())
    sharded.check()


@pytest.mark.parametrize("far", [(), (0, 1, 2), (1,)], ids=["near", "far", "one far"])
@pytest.mark.parametrize("space", [IMAGES, VECTORS, DICT], ids=["images", "vectors", "Dict"])
@pytest.mark.parametrize(
    "options", [{}, {"normalize_images": True}, {"buffer_class": CompressedNStepReplayBuffer}], ids=str
)
def test_shards_have_what_parts_in_this_process_have(space: Any, options: dict[str, Any], far: tuple[int, ...]) -> None:
    if space is DICT and "buffer_class" in options:
        pytest.skip("There is another class for Dict spaces.")
    sizes = (40, 100, 7, 70)
    here = filled(sizes, space, **options)
    there = filled(sizes, space, **REMOTE, shards=3, **options)
    for shard in far:
        move_away(there, shard)
    for prefetched in range(6):
        batches = []
        for buffer in (here, there):
            np.random.seed(prefetched)
            if buffer is there:
                buffer._shards._queue.clear()
            batches.append(tuple(buffer.sample(64)))
        assert_same(*batches)


def test_shards_need_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "IS_AVAILABLE", False)
    here, there = filled(), filled(**REMOTE, shards=2)
    for _ in range(3):  # batches that are kept, and one after another size
        np.random.seed(0)
        expected = tuple(here.sample(64))
        np.random.seed(0)
        assert_same(expected, tuple(there.sample(64)))
        there.sample(3)


@pytest.mark.parametrize("seed", range(4))
def test_batches_have_memory_of_their_own(seed: int) -> None:
    """Batches are kept, requested ahead and dropped, and shards die. What shards write late is in no other batch."""
    rng = np.random.default_rng(seed)
    np.random.seed(seed)
    sizes = (40, 60, 7, 70)
    here, buffer = filled(sizes), filled(sizes, **REMOTE, shards=3, prefetch=3)
    known = [part._samples_at(*np.divmod(np.arange(part.size() * N_ENVS), N_ENVS), None) for part in here.parts]
    observations, following = (np.concatenate([getattr(part, name) for part in known]) for name in FIELDS)
    kept: list[Any] = []
    for _ in range(120):
        action = rng.integers(10)
        if action == 0:
            # Only this shard works. The others do later what they were asked for before.
            with suppress(ShardDied):
                transport_of(buffer).result(transport_of(buffer).call(int(rng.integers(3)), "states"), 1.0)
        elif action == 1 and len(kept) > 3:
            del kept[: int(rng.integers(4))]
        elif action == 2 and rng.random() < 0.2:
            transport_of(buffer).kill(int(rng.integers(2)))
        else:
            kept.append(buffer.sample(int(rng.choice([16, 17]))))
        for batch in kept:
            numbers = batch.rewards.numpy().reshape(-1).astype(np.int64)
            np.testing.assert_array_equal(batch.observations, observations[numbers])
            np.testing.assert_array_equal(batch.next_observations, following[numbers])


def test_memory_is_used_again() -> None:
    buffer = filled(**REMOTE, shards=2)
    seen = [buffer.sample(64).observations.data_ptr() for _ in range(50)]
    assert len(set(seen)) <= 6


def test_every_transition_is_sampled_equally_often() -> None:
    buffer = filled(**REMOTE, shards=2)
    total = buffer.size() * N_ENVS
    np.random.seed(0)
    rewards = np.concatenate([buffer.sample(256).rewards.numpy().reshape(-1) for _ in range(300)])
    counts = np.bincount(rewards.astype(np.int64), minlength=total)
    assert abs(chi_square(counts, np.full(total, 300 * 256 / total))) < 4


def test_transitions_are_sampled_by_priority_over_all_shards() -> None:
    buffer = filled(buffer_class=CompressedPrioritizedReplayBuffer, alpha=1.0, **REMOTE, shards=2)
    total = buffer.size() * N_ENVS
    priorities = np.random.default_rng(0).uniform(0.1, 3, total) * np.repeat([1, 2, 3], [80, 200, 14])
    np.random.seed(0)
    seen = np.zeros(total, bool)
    while not seen.all():
        batch = buffer.sample(256)
        numbers = batch.rewards.numpy().reshape(-1).astype(np.int64)
        buffer.update_priorities(batch.indices, priorities[numbers] - 1e-6)
        seen[numbers] = True
    for _ in range(8):  # what was requested before is not by these priorities yet
        buffer.sample(256)
    drawn = [buffer.sample(256) for _ in range(300)]
    rewards = np.concatenate([batch.rewards.numpy().reshape(-1) for batch in drawn]).astype(np.int64)
    counts = np.bincount(rewards, minlength=total)
    assert chi_square(counts, 300 * 256 * priorities / priorities.sum()) < 4  # stratified: less than usual is fine
    weights = drawn[-1].weights.numpy().reshape(-1)
    chosen = priorities[drawn[-1].rewards.numpy().reshape(-1).astype(np.int64)]
    np.testing.assert_allclose(weights, (chosen.min() / chosen) ** 0.4, rtol=1e-4)


def test_weights_are_right_while_the_sums_of_priorities_are_out_of_date() -> None:
    """The expectation of a weighted mean does not depend on priorities if beta is 1."""
    buffer = filled(
        (50, 50), buffer_class=CompressedPrioritizedReplayBuffer, alpha=1.0, beta=1.0, **REMOTE, shards=2, prefetch=1
    )
    np.random.seed(0)
    for part, factor in enumerate((1.0, 5.0)):
        shard = transport_of(buffer).shards[part]
        buffer.sample(1)
        shard._parts.trees.set(np.zeros(100, np.int64), np.arange(100), np.full(100, factor))
    means = []
    for _ in range(3000):
        buffer._shards._totals[:] = 100.0  # as if both were the same
        batch = buffer.sample(8)
        rewards, weights = batch.rewards.numpy().reshape(-1) >= 100, batch.weights.numpy().reshape(-1)
        means.append((rewards * weights).sum() / weights.sum())
    assert np.mean(means) == pytest.approx(0.5, abs=0.02)


def test_priorities_of_transitions_that_were_replaced_are_dropped() -> None:
    buffer = make(size=100, buffer_class=CompressedPrioritizedReplayBuffer, alpha=1.0, **REMOTE, shards=1, prefetch=3)
    history = steps(200)
    for _ in range(50):
        buffer.add(*next(history))
    old = buffer.sample(64).indices
    for _ in range(50):
        buffer.add(*next(history))
    late = buffer.sample(64).indices  # requested before the buffer was overwritten
    fresh = [buffer.sample(64).indices for _ in range(4)][-1]
    for indices, accepted in ((old, False), (late, False), (fresh, True)):
        buffer.update_priorities(indices, np.full(64, 9.0))
        buffer._shards.ask_all("states")
        tree = transport_of(buffer).shards[0]._buffers[0]._tree
        assert bool((tree[np.arange(100)] > 8).any()) == accepted


@pytest.mark.parametrize("n_before", [10, 50, 70, 120])
def test_priorities_of_transitions_from_before_a_reset_are_dropped(n_before: int) -> None:
    buffer = make(size=100, buffer_class=CompressedPrioritizedReplayBuffer, alpha=1.0, **REMOTE, shards=1, prefetch=1)
    history = steps(1000)
    for step in itertools.islice(history, n_before):
        buffer.add(*step)
    old = buffer.sample(64).indices
    buffer.reset()
    tree = transport_of(buffer).shards[0]._buffers[0]._tree
    for n_new in (n_before, 50, 50):
        for step in itertools.islice(history, n_new):
            buffer.add(*step)
        fresh, before = buffer.sample(64).indices, tree[np.arange(100)]
        buffer.update_priorities(old, np.full(64, 5.0))
        buffer._shards.ask_all("states")
        assert_same(tree[np.arange(100)], before)
    buffer.update_priorities(fresh, np.full(64, 9.0))
    buffer._shards.ask_all("states")
    assert (tree[np.arange(100)] > 8).any()


def test_batches_are_requested_ahead() -> None:
    buffer = filled(**REMOTE, shards=2, prefetch=4)
    buffer.sample(8)
    for _ in range(10):
        buffer.sample(8)
        assert 0 < len(buffer._shards._queue) <= 4
    assert buffer.sample(16).rewards.shape == (16, 1)  # another size: what was requested is of no use
    assert {request.n for request in buffer._shards._queue} == {16}


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    first = make(**REMOTE, shards=2, path=tmp_path)
    for problem, parts in (("in use by another buffer", 2), ("other arguments: buffer_size", 3)):
        buffer = make(**REMOTE, shards=2, parts=parts, path=tmp_path)
        for step in steps(40):
            buffer.add(*step)
        with pytest.raises(ConfigurationError, match=problem):
            buffer.sample(8)
        first.close()


def test_an_empty_buffer_and_wrong_segments() -> None:
    buffer = make(**REMOTE, shards=2)
    with pytest.raises(EmptyBufferError):
        buffer.sample(4)
    other = make(CompressedReplayBuffer, space=VECTORS)
    for step in steps(5, space=VECTORS):
        other.add(*step)
    with pytest.raises(SegmentError, match="other spaces"):
        buffer.ingest_segment(other.export_segment())
    for step in steps(5):
        buffer.add(*step, part=1)
    assert buffer.sample(16).rewards.shape == (16, 1)
    buffer.reset()
    assert buffer.size() == 0
    with pytest.raises(EmptyBufferError):
        buffer.sample(4)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"shards": 0}, "shards"),
        ({"prefetch": 0}, "prefetch"),
        ({"on_loss": "ignore"}, "on_loss"),
        ({"storage": "mmap"}, "leave out storage"),
    ],
)
def test_arguments_that_cannot_work(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        make(ShardedReplayBuffer, **REMOTE, **options)


def test_a_buffer_in_shards_is_not_pickled() -> None:
    import pickle

    with pytest.raises(ConfigurationError, match="save"):
        pickle.dumps(filled(**REMOTE, shards=2))


@pytest.mark.parametrize("algorithm", [DQN, PrioritizedDQN])
def test_a_learner_with_collectors_and_shards(algorithm: Any) -> None:
    kwargs: dict[str, Any] = {**REMOTE, "shards": 2}
    if algorithm is PrioritizedDQN:
        kwargs["buffer_class"] = CompressedPrioritizedReplayBuffer
    model = distributed(algorithm)(
        "MlpPolicy", "CartPole-v1", device="cpu", seed=0, learning_starts=50, buffer_size=2000, batch_size=8,
        policy_kwargs={"net_arch": [8]}, replay_buffer_class=ShardedReplayBuffer, replay_buffer_kwargs=kwargs,
        collectors={"n": 3, "envs": 2, "segment_steps": 8, "in_process": True},
    )  # fmt: skip
    logger = Logger(None, [])
    model.set_logger(logger)
    model.learn(300)
    assert model.num_timesteps >= 300
    assert model._n_updates > 10
    assert all(part.size() > 0 for part in model.replay_buffer.parts)
    model.replay_buffer.check()
    logger.dump = lambda step=0: None  # type: ignore[method-assign]  # which would forget the values
    model.dump_logs()
    assert logger.name_to_value["shards/transitions_lost"] == 0
