"""Buffers whose observations lie on disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3 import DQN

from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError, SaveError
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer
from sb3_extra_buffers.persistence import folder as folder_module
from sb3_extra_buffers.storage.extent_arena import ExtentArena
from sb3_extra_buffers.storage.memory import FileMemory
from tests.methods import METHODS
from tests.persistence.buffers import ALL_CLASSES, IMAGES, N_ENVS, SLOTS, add, draw, goal_env, make, steps_for
from tests.transitions import assert_same

REPLAY = [name for name in ALL_CLASSES if name.startswith("Compressed") and "Rollout" not in name]


def on_disk(path: Path, name: str = "CompressedReplayBuffer", **kwargs: Any) -> Any:
    return make(name, storage="mmap", path=path, **kwargs)


def check_twins(one: Any, other: Any, transitions: list[Any]) -> None:
    assert_same(draw(one, 1), draw(other, 1))
    for number, transition in enumerate(transitions):
        add(one, transition, number)
        add(other, transition, number)
        assert_same(draw(one, number), draw(other, number))


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush by itself after every few steps."""
    monkeypatch.setattr(folder_module, "_WORTH_A_FLUSH", 1)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("name", REPLAY)
def test_every_replay_buffer(name: str, tmp_path: Path) -> None:
    """The same batches as from memory, while it is filled, after it was closed and opened, and after that."""
    plain, disk = make(name), on_disk(tmp_path / "buffer", name)
    transitions = steps_for(plain, 4 * SLOTS)
    check_twins(plain, disk, transitions[: 3 * SLOTS])
    disk.close()
    env = goal_env() if "Her" in name else None
    again = type(disk).load(tmp_path / "buffer", "cpu", env=env)
    assert type(again) is type(disk)
    check_twins(plain, again, transitions[3 * SLOTS :])


@pytest.mark.parametrize("key", ["x" * 300, "\u56fe" * 40, ".."], ids=["long", "Chinese", "dots"])
def test_keys_that_cannot_be_names_of_files(key: str, tmp_path: Path) -> None:
    space = spaces.Dict({key: IMAGES, key + "2": IMAGES})
    plain = make("CompressedDictReplayBuffer", space)
    disk = on_disk(tmp_path, "CompressedDictReplayBuffer", space=space)
    transitions = steps_for(plain, 20)
    check_twins(plain, disk, transitions[:10])
    disk.close()
    check_twins(plain, type(disk).load(tmp_path, "cpu"), transitions[10:])


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", REPLAY)
def test_every_method(name: str, method: str, tmp_path: Path) -> None:
    plain, disk = make(name, compression_method=method), on_disk(tmp_path, name, compression_method=method)
    transitions = steps_for(plain, SLOTS + 9)
    check_twins(plain, disk, transitions[:-5])
    disk.close()
    env = goal_env() if "Her" in name else None
    check_twins(plain, type(disk).load(tmp_path, "cpu", env=env), transitions[-5:])


def test_constructing_it_again_opens_what_is_there(tmp_path: Path) -> None:
    """Which is what ``DQN.load`` does."""
    arguments = {"replay_buffer_class": CompressedReplayBuffer, "learning_starts": 10, "buffer_size": 100}
    model = DQN(
        "MlpPolicy", "CartPole-v1", **arguments, replay_buffer_kwargs={"storage": "mmap", "path": tmp_path / "d"}
    )
    model.learn(60)
    model.save(tmp_path / "model")
    model.replay_buffer.close()
    loaded = DQN.load(tmp_path / "model", env=model.get_env())
    assert loaded.replay_buffer.size() == 60
    np.random.seed(0)
    batch = tuple(loaded.replay_buffer.sample(20))
    np.random.seed(0)
    assert_same(batch, tuple(model.replay_buffer.sample(20)))


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    """As soon as the buffer is used. The folder stays what it was."""
    on_disk(tmp_path).close()
    with pytest.raises(ConfigurationError, match="made with other arguments: compression_method"):
        on_disk(tmp_path, compression_method="zstd").flush()
    with pytest.raises(ConfigurationError, match="other arguments: class CompressedReplayBuffer"):
        on_disk(tmp_path, "CompressedNStepReplayBuffer").flush()
    on_disk(tmp_path).close()


def test_a_folder_belongs_to_one_buffer(tmp_path: Path) -> None:
    buffer = on_disk(tmp_path)
    with pytest.raises(ConfigurationError, match="in use by another buffer"):
        on_disk(tmp_path).flush()
    buffer.close()
    on_disk(tmp_path).flush()


def test_a_closed_buffer_can_be_read_only(tmp_path: Path) -> None:
    with on_disk(tmp_path) as buffer:
        steps = steps_for(buffer, 20)
        for step in steps:
            buffer.add(*step)
    buffer.sample(4)
    with pytest.raises(ConfigurationError, match="is closed"):
        buffer.add(*steps[0])
    with pytest.raises(ConfigurationError, match="is closed"):
        buffer.flush()
    buffer.close()


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (CompressedReplayBuffer, {"storage": "mmap"}),
        (CompressedReplayBuffer, {"path": "x"}),
        (CompressedReplayBuffer, {"storage": "tape", "path": "x"}),
        (CompressedRolloutBuffer, {"storage": "mmap", "path": "x"}),
        (GpuReplayBuffer, {"storage": "mmap", "path": "x"}),
    ],
)
def test_arguments_that_cannot_work(cls: Any, arguments: dict[str, Any], tmp_path: Path) -> None:
    if "path" in arguments:
        arguments = {**arguments, "path": tmp_path / "x"}
    with pytest.raises(ConfigurationError, match="storage"):
        cls(100, IMAGES, spaces.Discrete(2), "cpu", **arguments)
    assert not (tmp_path / "x").exists()


def test_a_copy_is_in_memory(tmp_path: Path) -> None:
    disk = on_disk(tmp_path / "buffer")
    transitions = steps_for(disk, 4 * SLOTS)
    for transition in transitions[: 2 * SLOTS]:
        disk.add(*transition)
    disk.save(tmp_path / "file")
    copies = [pickle.loads(pickle.dumps(disk)), CompressedReplayBuffer.load(tmp_path / "file", "cpu")]
    for transition in transitions[2 * SLOTS :]:
        for buffer in (disk, *copies):
            buffer.add(*transition)
    for buffer in copies:
        assert_same(draw(buffer, 1), draw(disk, 1))
        buffer.flush()  # nothing to do


def fill(path: Path, slots: int) -> None:
    """Never ends by itself. Rewards tell how many steps were added before."""
    buffer = on_disk(path, compression_method="none", frame_stack=None)
    steps = steps_for(buffer, 50)
    count = int(buffer.rewards.max()) + 1 if buffer.size() else 0
    while True:
        obs, next_obs, action, _, done, infos = steps[count % 50]
        buffer.add(obs, next_obs, action, np.full(N_ENVS, count), done, infos)
        count += 1
        if count % slots == 0:
            buffer.flush()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("between_flushes", [7, 3 * SLOTS])
def test_a_killed_process_leaves_what_was_flushed(between_flushes: int, tmp_path: Path) -> None:
    delays = random.Random(between_flushes)
    steps = steps_for(make("CompressedReplayBuffer"), 50)
    newest = -1
    for _ in range(12):
        child = multiprocessing.get_context("fork").Process(target=fill, args=(tmp_path, between_flushes))
        child.start()
        time.sleep(delays.uniform(0.05, 0.25))
        os.kill(child.pid, signal.SIGKILL)  # type: ignore[arg-type]  # it has been started
        child.join()
        with on_disk(tmp_path, compression_method="none", frame_stack=None) as buffer:
            assert buffer.rewards.max() >= newest
            newest = buffer.rewards.max()
            counts = buffer.rewards[: buffer.size(), 0].astype(int)
            for slot, count in enumerate(counts.tolist()):
                np.testing.assert_array_equal(buffer.observations[slot], steps[count % 50].obs)
                np.testing.assert_array_equal(buffer.next_observations[slot], steps[count % 50].next_obs)
            expected = np.sort(counts)
            assert len(counts) == 0 or (np.diff(expected) == 1).all()
    assert newest > 0


def test_a_missing_or_short_file_is_found(tmp_path: Path) -> None:
    with on_disk(tmp_path, compression_method="rle") as buffer:
        for step in steps_for(buffer, 70):
            buffer.add(*step)
    del buffer
    (arena,) = tmp_path.glob("*.arena")
    content = arena.read_bytes()
    arena.write_bytes(content[:100])
    with pytest.raises(CorruptDataError, match="limit"):
        CompressedReplayBuffer.load(tmp_path)
    arena.unlink()
    with pytest.raises(CorruptDataError, match="is missing"):
        CompressedReplayBuffer.load(tmp_path)


def test_a_full_disk(tmp_path: Path) -> None:
    from tests.persistence.test_container import files_no_larger_than

    buffer = on_disk(tmp_path, compression_method="rle")
    steps = steps_for(buffer, 70)

    def add_all() -> None:
        for step in steps:
            buffer.add(*step)

    with files_no_larger_than(1000), pytest.raises(SaveError, match="cannot grow"):
        add_all()
    buffer.close()
    assert CompressedReplayBuffer.load(tmp_path).size() < 70


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what memory is anonymous")
def test_memory_stays_small_while_it_is_filled_past_its_capacity(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.persistence.disk_probe", str(tmp_path), "500000"]
    found = json.loads(subprocess.run(command, cwd=root, stdout=subprocess.PIPE, timeout=600, check=True).stdout)
    assert found["transitions"] == 500_000
    assert found["data"] > 500_000 * 512
    assert found["oldest"] >= 500_000 // 125 // 2
    assert found["anonymous"] < found["data"] / 4
    assert found["file"] < 1.4 * found["data"]


@pytest.mark.parametrize("in_file", [True, False])
@given(data=st.data())
def test_bytes_that_are_held_are_not_written_to(
    in_file: bool, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An arena against a model of it: blocks in the order of arrival, and those that are held. In memory, none is."""
    path = tmp_path_factory.mktemp("arena") / "file"
    arena, blocks, held = ExtentArena(FileMemory(path) if in_file else None), [], []
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["add", "add", "add", "free", "let go", "clear"]))
        if action == "add":
            size = data.draw(st.sampled_from([1, 1000, 200_000, 3_000_000]))
            start = arena.allocate(size)
            while start is None:
                assert arena.grow(size)[1] == 0
                start = arena.allocate(size)
            assert start + size <= arena.limit <= len(arena.data)
            for other, length in [*blocks, *held]:
                assert start + size <= other or other + length <= start
            blocks.append((start, size))
        elif action == "free" and len(blocks) > 1:
            count = data.draw(st.integers(1, len(blocks) - 1))
            held += blocks[:count] if in_file else []
            blocks = blocks[count:]
            arena.free_until(blocks[0][0])
        elif action == "let go":
            arena.release_held()
            held = []
        elif action == "clear":
            held += blocks if in_file else []
            blocks = []
            arena.clear()
        assert arena.live_bytes == sum(size for _, size in blocks)
        assert arena.held_bytes >= sum(size for _, size in held)
        distances = arena.distance(np.array([start for start, _ in blocks], dtype=np.int64))
        assert (np.diff(distances) > 0).all()
