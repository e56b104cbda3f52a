"""The arena keeps what was written to it until it is freed, wherever it has to move it."""

from __future__ import annotations

import copy
import ctypes
import mmap
import pickle
import sys
from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sb3_extra_buffers.anonymous_memory import AnonymousMemory
from sb3_extra_buffers.storage import extent_arena
from sb3_extra_buffers.storage.arena import Arena
from sb3_extra_buffers.storage.config import StorageConfig
from sb3_extra_buffers.storage.extent_arena import ExtentArena
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.pickling import unpickled


class Block:
    def __init__(self, start: int, content: np.ndarray) -> None:
        self.start, self.content = start, content


class ArenaAgainstListOfBlocks(RuleBasedStateMachine):
    """An arena, and beside it the plain list of the blocks that must be in it, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena()
        self.blocks: deque[Block] = deque()
        self.written = 0
        self.most_alive = 0

    @rule(sizes=st.lists(st.integers(1, 30_000), min_size=1, max_size=8))
    def write(self, sizes: list[int]) -> None:
        for size in sizes:
            start = self.arena.allocate(size)
            while start is None:
                boundary, shift = self.arena.grow(size)
                for block in self.blocks:
                    block.start += shift if block.start >= boundary else 0
                start = self.arena.allocate(size)
            self.written += 1
            content = np.full(size, self.written % 251, np.uint8)
            self.arena.data[start : start + size] = content
            self.blocks.append(Block(start, content))
            self.most_alive = max(self.most_alive, sum(len(block.content) for block in self.blocks))

    @precondition(lambda self: len(self.blocks) > 1)
    @rule(share=st.floats(0, 1, exclude_max=True))
    def free_the_oldest(self, share: float) -> None:
        for _ in range(int(share * len(self.blocks))):
            self.blocks.popleft()
        self.arena.free_until(self.blocks[0].start)

    @rule()
    def discard_dead(self) -> None:
        self.arena.discard_dead()

    @rule()
    def clear(self) -> None:
        self.blocks.clear()
        self.arena.clear()

    @rule(duplicate=st.sampled_from([copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))]))
    def duplicate(self, duplicate: object) -> None:
        state = unpickled(duplicate(self.arena.state()))
        self.arena = type(self.arena)()
        self.arena.restore(state)

    @invariant()
    def every_live_block_is_intact(self) -> None:
        for block in self.blocks:
            assert np.array_equal(self.arena.data[block.start : block.start + len(block.content)], block.content)

    @invariant()
    def blocks_are_told_apart_by_age(self) -> None:
        starts = np.array([block.start for block in self.blocks], dtype=np.int64)
        assert (np.diff(self.arena.distance(starts)) > 0).all()

    @invariant()
    def live_bytes_are_no_fewer_than_those_of_the_blocks(self) -> None:
        alive = sum(len(block.content) for block in self.blocks)
        assert self.arena.live_bytes >= alive
        assert self.arena.nbytes <= len(self.arena.data)

    @invariant()
    def it_is_not_much_larger_than_it_ever_had_to_be(self) -> None:
        # Blocks are not cut in two, so that one of them may not fit at the end, and growing has a smallest step.
        assert self.arena.nbytes <= 1.1 * self.most_alive + 30_000 + 3 * (1 << 16)


ArenaAgainstListOfBlocks.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestArena = ArenaAgainstListOfBlocks.TestCase


def test_a_ring_that_is_full_and_overwritten_for_ever_does_not_grow() -> None:
    arena, blocks = Arena(), deque()
    rng = np.random.default_rng(0)
    sizes = []
    for step in range(20_000):
        size = int(rng.integers(10, 200))
        start = arena.allocate(size)
        while start is None:
            boundary, shift = arena.grow(size)
            blocks = deque((begin + shift if begin >= boundary else begin, length) for begin, length in blocks)
            start = arena.allocate(size)
        blocks.append((start, size))
        if step >= 2000:
            blocks.popleft()
            arena.free_until(blocks[0][0])
        sizes.append(arena.nbytes)
    assert sizes[-1] == sizes[4000]
    assert sizes[-1] < 1.5 * 2000 * 105


class TestAnonymousMemory:
    @pytest.mark.skipif(sys.platform != "linux", reason="other systems may keep discarded bytes")
    def test_discards_whole_pages_only(self) -> None:
        memory, page = AnonymousMemory(8 * mmap.PAGESIZE), mmap.PAGESIZE
        memory.data[:] = 7
        memory.discard(page - 1, page + 1)
        memory.discard(2 * page + 1, 5 * page - 1)
        assert np.flatnonzero(memory.data.reshape(8, page).min(axis=1) == 0).tolist() == [3]
        assert (memory.data.reshape(8, page)[[0, 1, 2, 4, 5, 6, 7]] == 7).all()

    @pytest.mark.skipif(sys.platform != "linux", reason="needs mlock")
    def test_pages_that_are_locked_are_kept(self) -> None:
        memory = AnonymousMemory(4 * mmap.PAGESIZE)
        memory.data[:] = 7
        if ctypes.CDLL(None).mlock(ctypes.c_void_p(memory.data.ctypes.data), ctypes.c_size_t(mmap.PAGESIZE)):
            pytest.skip("this user may not lock memory")
        memory.discard(0, mmap.PAGESIZE)
        assert (memory.data == 7).all()

    def test_keeps_its_contents_when_it_grows(self) -> None:
        memory = AnonymousMemory(1000)
        memory.data[:1000] = np.arange(1000) % 251
        memory.resize(500_000)
        assert len(memory.data) >= 500_000
        assert np.array_equal(memory.data[:1000], np.arange(1000) % 251)
        memory.data[-1] = 1

    def test_grows_while_somebody_looks_at_it(self) -> None:
        memory = AnonymousMemory(1000)
        memory.data[:] = 7
        view = memory.data[10:20]
        memory.resize(500_000)
        assert (view == 7).all()
        assert (memory.data[:1000] == 7).all()

    @pytest.mark.parametrize("size", [0, 1])
    def test_may_be_tiny(self, size: int) -> None:
        assert len(AnonymousMemory(size).data) >= size


@pytest.mark.parametrize("most", [0, 1 << 30])
def test_a_large_ring_that_is_full_grows_without_moving_bytes(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extent_arena, "_MOST_BYTES_TO_MOVE", most)
    config = StorageConfig.from_arguments("gzip1", None, None, None, None)
    store = ObservationStore(40, 2, (30, 30, 1), np.dtype(np.uint8), config, 1)
    rng, expected = np.random.default_rng(0), np.zeros((40, 2, 30, 30, 1), np.uint8)
    for t in range(400):
        # Observations that compress worse and worse, so that the ring has to grow when it has wrapped.
        values = rng.integers(0, 2 + t // 4, (2, 30, 30, 1)).astype(np.uint8)
        store.write(0, t % 40, values)
        expected[t % 40] = values
        if t % 50 == 49:
            store.check()
            assert (type(store.frames.arena) is ExtentArena) == (most == 0 and t > 50)
            slots, envs = (grid.reshape(-1) for grid in np.mgrid[:40, :2])
            (found,) = store.read([(0, slots)], envs)
            assert np.array_equal(found.reshape(expected.shape), expected)
            store = pickle.loads(pickle.dumps(store))
