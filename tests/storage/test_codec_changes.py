"""When ``auto`` changes the codec, what is stored stays where it is, exact, until it is overwritten."""

from __future__ import annotations

import copy
import mmap
import pickle
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.storage import choice, observation_store
from sb3_extra_buffers.storage.config import CodecRecipe
from sb3_extra_buffers.storage.joined import JoinedStores
from sb3_extra_buffers.storage.observation_store import ObservationStore
from tests.methods import installed

SPACE = spaces.Box(0, 255, (2, 16, 16), np.uint8)
SLOTS, N_ENVS = 150, 3
RECIPES = [CodecRecipe(parse_method(method)) for method in installed("delta", "gzip1", "zstd-dict/3", "none")]


class Game:
    """A buffer and all that was added to it."""

    def __init__(self, space: spaces.Box = SPACE) -> None:
        self.rng = np.random.default_rng(0)
        self.buffer = CompressedReplayBuffer(SLOTS * N_ENVS, space, spaces.Discrete(2), "cpu", N_ENVS, frame_stack=2)
        self.now = self.rng.integers(0, 256, (N_ENVS, *space.shape), dtype=np.uint8)
        self.observations = np.zeros((SLOTS, N_ENVS, *space.shape), np.uint8)
        self.successors = self.observations.copy()

    @property
    def store(self) -> ObservationStore:
        return self.buffer._stores[""]

    def add(self, n: int) -> None:
        for _ in range(n):
            following = np.concatenate([self.now[:, 1:], self.now[:, 1:]], axis=1)
            following[:, 1, self.rng.integers(16), :16] = self.rng.integers(0, 256, 16)
            slot = self.buffer.pos
            self.observations[slot], self.successors[slot] = self.now, following
            zeros = np.zeros(N_ENVS)
            self.buffer.add(self.now, following, zeros, zeros, zeros, [{}] * N_ENVS)
            self.now = following

    def check(self, buffer: CompressedReplayBuffer | None = None) -> None:
        buffer = buffer or self.buffer
        buffer.check()
        np.testing.assert_array_equal(np.asarray(buffer.observations), self.observations)
        np.testing.assert_array_equal(np.asarray(buffer.next_observations), self.successors)


def test_observations_of_all_codecs_are_exact_and_those_overwritten_are_released() -> None:
    game = Game()
    game.add(60)
    most = 0
    for number in range(24):
        game.store.change_codec(RECIPES[number % len(RECIPES)])
        game.check()
        game.add(37)
        game.store.release_earlier()
        game.check()
        most = max(most, len(game.store.frame_stores))
    assert most == 5  # of 150 slots, 37 for each codec
    game.add(SLOTS + 1)
    game.store.release_earlier()
    assert len(game.store.frame_stores) == 1
    game.check()


@pytest.mark.skipif(not has_numba(), reason="is about the compiled kernel")
def test_the_kernel_reads_the_observations_of_replaced_codecs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two joined buffers, whose codecs were changed at different times: one of them twice, the other once."""
    games = Game(), Game()
    for game, changes in zip(games, ({40: RECIPES[2], 90: RECIPES[0]}, {70: RECIPES[3]}), strict=True):
        for step in range(SLOTS):
            if step in changes:
                game.store.change_codec(changes[step])
            game.add(1)
    monkeypatch.delattr(JoinedStores, "_fill_one_by_one")  # what it does without a kernel
    numbers = np.repeat([0, 1], SLOTS * N_ENVS)
    slots, envs = (np.tile(part.reshape(-1), 2) for part in np.indices((SLOTS, N_ENVS)))
    outs = [np.zeros((len(numbers), *SPACE.shape), np.uint8) for _ in range(2)]
    JoinedStores([game.store for game in games]).fill(numbers, [(0, slots), (1, slots)], envs, outs)
    for game, *found in zip(games, *(np.split(out, 2) for out in outs), strict=True):
        np.testing.assert_array_equal(found[0], game.observations.reshape(found[0].shape))
        np.testing.assert_array_equal(found[1], game.successors.reshape(found[1].shape))


@pytest.mark.skipif(not has_numba(), reason="is about the compiled kernel")
def test_observations_before_those_of_a_codec_without_a_kernel_are_read_as_well() -> None:
    game = Game()
    for recipe in (RECIPES[0], RECIPES[1], RECIPES[3], RECIPES[0]):  # the second one is gzip
        game.store.change_codec(recipe)
        game.add(SLOTS // 4)
        game.check()
    game.add(SLOTS // 8)
    game.check()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells which pages are resident")
def test_the_memory_of_a_replaced_codec_goes_back_to_the_system_little_by_little() -> None:
    rng = np.random.default_rng(0)
    space = spaces.Box(0, 255, (1, 128, 128), np.uint8)
    buffer = CompressedReplayBuffer(600, space, spaces.Discrete(2), "cpu", compression_method="none", frame_stack=1)

    def add(n: int) -> None:
        for _ in range(n):
            observation = rng.integers(0, 256, (1, *space.shape), dtype=np.uint8)
            buffer.add(observation, observation, np.zeros(1), np.zeros(1), np.zeros(1), [{}])

    store = buffer._stores[""]
    add(600)
    replaced = store.frames
    before, live = resident_bytes(replaced.arena.data), replaced.arena.live_bytes
    assert before > 0.9 * live > 8 << 20
    store.change_codec(CodecRecipe(parse_method("gzip/0")))
    store._next_due = 0  # as when auto has changed it
    add(300)
    half = resident_bytes(replaced.arena.data)
    assert store.frame_stores[1] is replaced
    assert half < 0.8 * before
    assert replaced.arena.live_bytes < 0.8 * live
    buffer.check()
    add(450)
    assert len(store.frame_stores) == 1


def resident_bytes(array: np.ndarray) -> int:
    """How much of an array is in physical memory, by the kernel's page map."""
    begin, end = array.ctypes.data // mmap.PAGESIZE, -(-(array.ctypes.data + array.nbytes) // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * begin)
        pages = np.frombuffer(file.read(8 * (end - begin)), dtype=np.uint64)
    return int((pages >> np.uint64(63)).sum()) * mmap.PAGESIZE


def test_they_survive_saving_and_pickling(tmp_path: Path) -> None:
    game = Game()
    game.add(60)
    for recipe in RECIPES:
        game.store.change_codec(recipe)
        game.add(25)
        game.buffer.save(tmp_path / "buffer")
        for again in (
            CompressedReplayBuffer.load(tmp_path / "buffer", "cpu"),
            CompressedReplayBuffer.load(tmp_path / "buffer", "cpu", mmap=True),
            pickle.loads(pickle.dumps(game.buffer)),
            copy.deepcopy(game.buffer),
        ):
            assert len(again._stores[""].frame_stores) == len(game.store.frame_stores)
            game.check(again)
    game.buffer = CompressedReplayBuffer.load(tmp_path / "buffer", "cpu")
    game.add(400)
    game.check()


def test_a_buffer_on_disk_is_opened_with_all_its_codecs(tmp_path: Path) -> None:
    game = Game()
    arguments = (SLOTS * N_ENVS, SPACE, spaces.Discrete(2), "cpu", N_ENVS)
    game.buffer = CompressedReplayBuffer(*arguments, frame_stack=2, storage="mmap", path=tmp_path)
    game.add(60)
    for number in range(9):
        game.store.change_codec(RECIPES[number % len(RECIPES)])
        game.add(30)
        game.buffer.close()
        game.buffer = CompressedReplayBuffer(*arguments, frame_stack=2, storage="mmap", path=tmp_path)
        game.check()
    n_codecs = len(game.store.frame_stores)
    game.buffer.close()
    assert len(list(tmp_path.glob("*.arena"))) == n_codecs


def test_a_reset_forgets_all_of_them() -> None:
    game = Game()
    for recipe in RECIPES:
        game.store.change_codec(recipe)
        game.add(20)
    game.store.clear()
    assert len(game.store.frame_stores) == 1
    game.buffer.check()
    assert not np.asarray(game.buffer.observations).any()


def test_changing_the_codec_of_a_full_buffer_takes_no_longer_than_other_steps() -> None:
    """It used to store everything anew, inside one call of add()."""
    game = Game()
    game.add(SLOTS + 10)
    seconds = []
    for number in range(6):
        began = time.perf_counter()
        game.store.change_codec(RECIPES[number % len(RECIPES)])
        seconds.append(time.perf_counter() - began)
        game.add(30)
        game.store.release_earlier()
    assert min(seconds) < 0.005


def test_auto_changes_to_another_codec_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation_store, "REVIEW_STEPS", 80)
    monkeypatch.setattr(choice, "_FEWEST_STEPS", 40)
    monkeypatch.setattr(choice, "_MOST_STEPS", 40)
    game, used = Game(spaces.Box(0, 255, (2, 32, 32), np.uint8)), set()
    for _ in range(4):
        game.add(260)
        used.add(game.store.codec.name)
        game.check()
        for _ in range(260):  # noise, which nothing compresses
            game.now = game.rng.integers(0, 256, game.now.shape, dtype=np.uint8)
            game.add(1)
        used.add(game.store.codec.name)
        game.check()
    assert len(used) > 1
