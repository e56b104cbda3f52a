"""Several buffers that are read together return what each of them returns on its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_extra_buffers import compiled
from sb3_extra_buffers.codecs.method import Method
from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedNStepReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    CompressedReplayBuffer,
)
from sb3_extra_buffers.compressed.sum_tree import JoinedTrees, SumTree
from sb3_extra_buffers.distributed.parts import Parts, Places
from sb3_extra_buffers.storage.config import CodecRecipe
from sb3_extra_buffers.storage.joined import places_of
from sb3_extra_buffers.storage.observation_store import ObservationStore
from tests.histories import worlds
from tests.transitions import assert_same

ACTIONS, N_ENVS, N_SLOTS = spaces.Discrete(4), 2, 60
IMAGES, LAST, VECTORS = (worlds.SPACES[name] for name in ("stack", "stack, channels last", "float64"))
DICT = worlds.DICT_SPACES["Dict"]


@pytest.fixture(params=["compiled", "NumPy"])
def kernels(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "NumPy":
        monkeypatch.setattr(compiled, "has_numba", lambda: False)
        compiled.load_kernels.cache_clear()
    yield
    compiled.load_kernels.cache_clear()


def make(cls: Any, space: Any, **options: Any) -> Any:
    # Otherwise a short history may not show it, and parts with different stacks are not read together.
    options = {"frame_stack": 4 if space in (IMAGES, LAST) else "auto", **options}
    return cls(N_SLOTS * N_ENVS, space, ACTIONS, device="cpu", n_envs=N_ENVS, **options)


def fill(buffer: Any, n_steps: int, seed: int) -> None:
    space = buffer.observation_space
    rng = np.random.default_rng(seed)
    for step in itertools.islice(worlds.transitions(space, ACTIONS, N_ENVS, rng, 9), n_steps):
        buffer.add(*step)


def some_places(buffers: list[Any], n: int, seed: int) -> Places:
    """Anywhere, with the newest and the oldest transitions of each part among them."""
    rng, chosen = np.random.default_rng(seed), []
    for number, buffer in enumerate(buffers):
        n_slots = buffer.size()
        slots = [*rng.integers(0, n_slots, n), (buffer.pos - 1) % n_slots, buffer.pos % n_slots, 0]
        if buffer.optimize_memory_usage and buffer.full:
            slots = [slot for slot in slots if slot != buffer.pos]
        chosen += [(number, slot, rng.integers(N_ENVS)) for slot in slots]
    return Places(*(np.array(column, dtype=np.int64) for column in zip(*chosen, strict=True)))


def check(buffers: list[Any], seed: int = 0, parts: Parts | None = None) -> None:
    parts = parts or Parts(buffers, th.device("cpu"))
    for again in range(2):  # the second time, from what was kept of the first
        places = some_places(buffers, 7, seed + again)
        found = parts.sample(places, None)
        for number, buffer in enumerate(buffers):
            mine = places.numbers == number
            alone = buffer._samples_at(places.slots[mine], places.envs[mine], None)
            rows = th.from_numpy(np.flatnonzero(mine))
            for ours, theirs in zip(found, alone, strict=True):
                if isinstance(theirs, dict):
                    assert_same({key: part[rows] for key, part in ours.items()}, theirs)
                elif theirs is None:
                    assert ours is None
                else:
                    assert_same(ours[rows], theirs)
        for number, buffer in enumerate(buffers):  # arrays that were kept may have been replaced
            fill(buffer, 20 * number, seed + number)


@pytest.mark.parametrize(
    ("cls", "space", "options"),
    [
        (CompressedReplayBuffer, IMAGES, {}),
        (CompressedReplayBuffer, IMAGES, {"verify": True}),
        (CompressedReplayBuffer, IMAGES, {"normalize_images": True}),
        (CompressedReplayBuffer, IMAGES, {"compression_method": "zstd-dict"}),
        (CompressedReplayBuffer, IMAGES, {"compression_method": "gzip"}),
        (CompressedReplayBuffer, LAST, {}),
        (CompressedReplayBuffer, VECTORS, {}),
        (CompressedReplayBuffer, VECTORS, {"verify": True}),
        (
            CompressedReplayBuffer,
            VECTORS,
            {"optimize_memory_usage": True, "handle_timeout_termination": False},
        ),
        (
            CompressedReplayBuffer,
            IMAGES,
            {"optimize_memory_usage": True, "handle_timeout_termination": False},
        ),
        (CompressedDictReplayBuffer, DICT, {}),
        (CompressedNStepReplayBuffer, IMAGES, {"n_steps": 4}),
        (CompressedNStepReplayBuffer, VECTORS, {"n_steps": 1}),
        (CompressedPrioritizedReplayBuffer, VECTORS, {"n_steps": 3}),
        (CompressedPrioritizedReplayBuffer, IMAGES, {}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("kernels")
def test_a_batch_has_what_the_parts_have(cls: Any, space: Any, options: dict[str, Any]) -> None:
    buffers = [make(cls, space, **options) for _ in range(4)]
    for buffer, n_steps in zip(buffers, (3, 45, N_SLOTS, 3 * N_SLOTS + 7), strict=True):
        fill(buffer, n_steps, n_steps)
    check(buffers)


def test_parts_with_other_codecs_and_other_stacks() -> None:
    methods = ("delta", "zstd3", "none", "gzip")
    buffers = [make(CompressedReplayBuffer, IMAGES, compression_method=method) for method in methods]
    buffers.append(make(CompressedReplayBuffer, IMAGES, frame_stack=None))
    for number, buffer in enumerate(buffers):
        fill(buffer, 50, number)
    check(buffers[:3])  # each has a kernel
    check(buffers[:4])
    check(buffers)


def test_parts_of_which_one_has_found_out_how_its_observations_are_stacked() -> None:
    buffers = [make(CompressedReplayBuffer, IMAGES, frame_stack="auto") for _ in range(2)]
    for number, buffer in enumerate(buffers):
        fill(buffer, 3, number)
    parts = Parts(buffers, th.device("cpu"))
    parts.sample(some_places(buffers, 5, 0), None)
    fill(buffers[0], 30, 2)
    assert [buffer._stores[""].layout.stack for buffer in buffers] == [4, 1]
    check(buffers, parts=parts)


def test_parts_that_have_changed_their_codec() -> None:
    buffers = [make(CompressedReplayBuffer, IMAGES) for _ in range(3)]
    for number, buffer in enumerate(buffers):
        fill(buffer, 25, number)
        store = buffer._stores[""]
        assert isinstance(store, ObservationStore)
        if number:
            store.change_codec(CodecRecipe(Method("none")))
        if number == 1:
            fill(buffer, 25, number + 10)
    check(buffers)
    check(buffers[2:])  # nothing is in the newest store


def test_parts_whose_flags_were_asked_for() -> None:
    for cls in (CompressedReplayBuffer, CompressedNStepReplayBuffer):
        buffers = [make(cls, VECTORS) for _ in range(3)]
        for number, buffer in enumerate(buffers):
            fill(buffer, 40, number)
        buffers[1].dones[:] *= 0.5  # no flag can hold this
        check(buffers)
        buffers[2].actions[3] = 1000  # nor a byte this
        check(buffers)


def test_the_memory_of_a_part_still_grows_in_place() -> None:
    """A reference to it would make every growth copy everything."""
    buffers = [make(CompressedReplayBuffer, IMAGES, compression_method="none") for _ in range(2)]
    for number, buffer in enumerate(buffers):
        fill(buffer, 20, number)
    parts = Parts(buffers, th.device("cpu"))
    parts.sample(some_places(buffers, 5, 0), None)
    memory = buffers[0]._stores[""].frames.arena._memory
    kept, neighbours = memory._map, []
    for _ in range(4):
        memory.resize(2 * len(memory.data))
        neighbours.append(np.ones(1 << 20))  # so that it has to move
    assert memory._map is kept
    fill(buffers[0], 30, 3)
    check(buffers, parts=parts)


def test_reference_frames_still_grow_in_place() -> None:
    buffers = [make(CompressedReplayBuffer, IMAGES, compression_method="delta") for _ in range(2)]
    for number, buffer in enumerate(buffers):
        fill(buffer, 20, number)
    codec = buffers[0]._stores[""].codec
    frame = codec.reference_content(1).copy()
    while codec._memory is None:
        codec.import_reference(frame)
    Parts(buffers, th.device("cpu")).sample(some_places(buffers, 5, 0), None)
    buffers[0].sample(5)
    kept = codec._memory._map
    for _ in range(200):
        codec.import_reference(frame)
    assert codec._memory._map is kept


@pytest.mark.usefixtures("kernels")
def test_trees_are_drawn_from_together() -> None:
    rng = np.random.default_rng(0)
    priorities = rng.uniform(0, 1, (5, 300)) * (rng.random((5, 300)) < 0.5)
    priorities[[0, 3]] = 0
    trees = [SumTree(300) for _ in priorities]
    for tree, row in zip(trees[:3], priorities[:3], strict=True):
        tree[np.arange(300)] = row
    joined = JoinedTrees(trees)
    rest = np.arange(300, 5 * 300)
    joined.set(*np.divmod(rest, 300), priorities.reshape(-1)[rest])
    for tree, row, total in zip(trees, priorities, joined.totals, strict=True):
        np.testing.assert_array_equal(tree[np.arange(300)], row)
        assert tree.total == total == pytest.approx(row.sum())
    ends = priorities.reshape(-1).cumsum()
    heights = rng.uniform(0, ends[-1], 1000)
    numbers, found = joined.find(heights)
    np.testing.assert_array_equal(numbers * 300 + found, np.searchsorted(ends, heights, side="right"))
    numbers, found = joined.find(np.array([0.0, ends[-1], 2 * ends[-1]]))
    assert (joined.get(numbers, found) > 0).all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("counts", [(6, 0, 10), (0, 0, 2), (4, 4, 0), (30,)], ids=str)
def test_every_transition_has_the_same_share_of_what_is_drawn(counts: tuple[int, ...]) -> None:
    n_slots, n_envs, firsts, total = 15, 2, np.array([3, 0, 14, 1][: len(counts)]), sum(counts)
    expected = [
        (number, (firsts[number] + place // n_envs) % n_slots, place % n_envs)
        for number, count in enumerate(counts)
        for place in range(count)
    ]
    for offset in (0.0, 0.5, 0.999):
        drawn = (np.arange(total) + offset) / total
        assert list(zip(*places_of(drawn, np.array(counts), firsts, n_slots, n_envs).tolist(), strict=True)) == expected
    last = places_of(np.array([np.nextafter(1, 0)]), np.array(counts), firsts, n_slots, n_envs)
    assert tuple(last[:, 0]) == expected[-1]
