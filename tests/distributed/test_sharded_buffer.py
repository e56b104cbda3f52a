"""A buffer of several parts is sampled as if it were one."""

from __future__ import annotations

import copy
import itertools
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedHerReplayBuffer,
    CompressedNStepReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    CompressedReplayBuffer,
)
from sb3_extra_buffers.distributed import ShardedReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError, EmptyBufferError
from tests.compressed.test_interrupted import interrupted
from tests.histories import worlds
from tests.transitions import assert_same

ACTIONS, N_ENVS = spaces.Discrete(4), 2
IMAGES, VECTORS, DICT = worlds.SPACES["stack"], worlds.SPACES["float64"], worlds.DICT_SPACES["Dict"]


def make(cls: Any = ShardedReplayBuffer, size: int = 600, space: Any = IMAGES, **options: Any) -> Any:
    return cls(size, space, ACTIONS, device="cpu", n_envs=N_ENVS, **options)


def steps(n: int, seed: int = 0, space: Any = IMAGES) -> Any:
    return itertools.islice(worlds.transitions(space, ACTIONS, N_ENVS, np.random.default_rng(seed), 30), n)


def filled(sizes: tuple[int, ...] = (40, 100, 7), space: Any = IMAGES, **options: Any) -> Any:
    """Parts of these sizes. Rewards tell transitions apart."""
    buffer, numbers = make(parts=len(sizes), space=space, **options), itertools.count()
    for part, size in enumerate(sizes):
        for step in steps(size, part, space):
            reward = np.array([next(numbers) for _ in range(N_ENVS)], dtype=np.float32)
            buffer.add(*step._replace(reward=reward), part=part)
    return buffer


@pytest.mark.parametrize(
    ("cls", "space", "options"),
    [
        (CompressedReplayBuffer, IMAGES, {}),
        (CompressedReplayBuffer, VECTORS, {}),
        (CompressedDictReplayBuffer, DICT, {}),
        (CompressedNStepReplayBuffer, IMAGES, {"n_steps": 3}),
        (CompressedPrioritizedReplayBuffer, IMAGES, {"alpha": 0.7}),
    ],
)
def test_one_part_is_the_class_itself(cls: Any, space: Any, options: dict[str, Any]) -> None:
    single, sharded = make(cls, space=space, **options), make(space=space, buffer_class=cls, **options)
    for number, step in enumerate(steps(400, space=space)):
        single.add(*step)
        sharded.add(*step)
        if number % 50 == 49:
            batches = []
            for buffer in (single, sharded):
                np.random.seed(number)
                batches.append(tuple(buffer.sample(32)))
                if "alpha" in options:
                    buffer.update_priorities(batches[-1][-1], np.linspace(-1, 2, 32))
            assert_same(batches[0], batches[1])
    assert (single.pos, single.full, single.size()) == (sharded.pos, sharded.full, sharded.size())


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the statistic is from what it should be."""
    statistic, n = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    return float((statistic - n) / np.sqrt(2 * n))


def test_every_transition_is_sampled_equally_often() -> None:
    buffer = filled()
    total = buffer.size() * N_ENVS
    np.random.seed(0)
    rewards = np.concatenate([buffer.sample(256).rewards.numpy().reshape(-1) for _ in range(300)])
    counts = np.bincount(rewards.astype(np.int64), minlength=total)
    assert abs(chi_square(counts, np.full(total, 300 * 256 / total))) < 4


def test_transitions_are_sampled_by_priority_over_all_parts() -> None:
    buffer = filled(buffer_class=CompressedPrioritizedReplayBuffer, alpha=1.0)
    total = buffer.size() * N_ENVS
    rng = np.random.default_rng(0)
    priorities = np.zeros(total)
    offset = 0
    for number, part in enumerate(buffer.parts):
        n, first = part.size() * N_ENVS, number * part.buffer_size * N_ENVS
        errors = rng.uniform(0.1, 3, n) * (1 + number)
        buffer.update_priorities(np.arange(first, first + n), errors)
        priorities[offset : offset + n] = errors
        offset += n
    assert len({part.max_priority for part in buffer.parts}) == 1
    np.random.seed(0)
    drawn = [buffer.sample(256) for _ in range(300)]
    rewards = np.concatenate([batch.rewards.numpy().reshape(-1) for batch in drawn]).astype(np.int64)
    counts = np.bincount(rewards, minlength=total)
    assert chi_square(counts, 300 * 256 * priorities / priorities.sum()) < 4  # stratified: less than usual is fine
    weights = drawn[0].weights.numpy().reshape(-1)
    chosen = priorities[drawn[0].rewards.numpy().reshape(-1).astype(np.int64)]
    np.testing.assert_allclose(weights, (chosen.min() / chosen) ** 0.4, rtol=1e-4)


@pytest.mark.parametrize("space", [IMAGES, VECTORS, DICT], ids=["images", "vectors", "Dict"])
@pytest.mark.parametrize("options", [{}, {"normalize_images": True}, {"verify": True}], ids=str)
def test_a_batch_holds_what_was_added(space: Any, options: dict[str, Any]) -> None:
    buffer, plain = filled(space=space, **options), []
    for part in buffer.parts:
        everything = part._samples_at(*np.divmod(np.arange(part.size() * N_ENVS), N_ENVS), None)
        plain.append(everything)
    batch = buffer.sample(64)
    expected_rewards = th.cat([part.rewards for part in plain]).reshape(-1)
    rows = [int((expected_rewards == reward).nonzero()) for reward in batch.rewards.reshape(-1)]
    for name in ("observations", "next_observations", "actions", "dones"):
        found, parts = getattr(batch, name), [getattr(part, name) for part in plain]
        for key in found if isinstance(found, dict) else [None]:
            ours = found if key is None else found[key]
            theirs = th.cat([part if key is None else part[key] for part in parts])[rows]
            assert_same(ours, theirs)


def test_batches_stay_as_they_are_when_others_are_sampled() -> None:
    buffer = filled()
    first = buffer.sample(64)
    kept = first.observations.clone(), first.next_observations.clone()
    for _ in range(10):
        buffer.sample(64)
    assert_same((first.observations, first.next_observations), kept)


def test_a_batch_can_be_sampled_after_ctrl_c_in_the_one_before() -> None:
    n_interrupted = 0
    for line in range(1, 130):
        buffer = filled((5, 7), space=DICT)
        if line % 2:
            buffer.sample(8)
        n_interrupted += interrupted(partial(buffer.sample, 16), line)
        for n in (8, 16):
            rewards = buffer.sample(n).rewards
            assert rewards.shape == (n, 1)
            assert set(rewards.reshape(-1).tolist()) <= set(range(12 * N_ENVS))
    assert n_interrupted > 60


def test_parts_without_transitions_are_left_out() -> None:
    buffer = make(parts=3)
    with pytest.raises(EmptyBufferError):
        buffer.sample(4)
    for step in steps(5):
        buffer.add(*step, part=1)
    assert buffer.sample(16).rewards.shape == (16, 1)


def test_n_step_returns_do_not_go_from_one_part_to_another() -> None:
    buffer = filled(buffer_class=CompressedNStepReplayBuffer, n_steps=5, gamma=1.0)
    batch = buffer.sample(200)
    assert batch.discounts is not None
    assert (batch.rewards >= 0).all()


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "copy", "files"])
def test_a_copy_is_sampled_like_the_original(how: str, tmp_path: Any) -> None:
    buffer = filled()
    if how == "files":
        buffer.save(tmp_path / "buffer")
        other = ShardedReplayBuffer.load(tmp_path / "buffer", device="cpu")
    else:
        ways: Any = {"pickle": lambda b: pickle.loads(pickle.dumps(b)), "deepcopy": copy.deepcopy, "copy": copy.copy}
        other = ways[how](buffer)
    batches = []
    for each in (buffer, other):
        np.random.seed(0)
        batches.append(tuple(each.sample(64)))
    assert_same(*batches)
    other.check()


def test_closing_a_buffer_on_disk_unlocks_its_folder(tmp_path: Any) -> None:
    buffer = make(storage="mmap", path=tmp_path)
    for step in steps(20):
        buffer.add(*step)
    buffer.close()
    again = make(storage="mmap", path=tmp_path)
    assert again.sample(8).rewards.shape == (8, 1)
    assert again.size() == 20
    again.close()


def test_only_the_newest_step_can_be_marked_as_done() -> None:
    buffer = filled((5, 7))
    newest = buffer.pos - 1
    with pytest.raises(IndexError, match=rf"dones\[3\] .* dones\[{newest}\]"):
        buffer.dones[3] = True
    with pytest.raises(IndexError, match="False"):
        buffer.dones[newest] = False
    buffer.dones[newest - buffer.buffer_size] = True
    assert all((part.dones[part.pos - 1] + part.timeouts[part.pos - 1] > 0).all() for part in buffer.parts)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"placement": "elsewhere"}, "placement"),
        ({"parts": 0}, "parts"),
        ({"buffer_class": CompressedHerReplayBuffer}, "hindsight"),
        ({"buffer_class": dict}, "CompressedReplayBuffer or derived from it"),
        ({"parts": 2, "storage": "mmap", "path": "x"}, "single part"),
    ],
)
def test_arguments_that_cannot_work(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        make(**options)
