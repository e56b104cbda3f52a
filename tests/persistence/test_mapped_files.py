"""``load(mmap=True)``: what it takes, and that it is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers import anonymous_memory
from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.persistence import container
from sb3_extra_buffers.storage.memory import TemporaryMemory
from tests.methods import METHODS
from tests.persistence.buffers import SLOTS, add, draw, make, steps_for
from tests.persistence.memory_probe import N_ENVS, fill, make_buffer
from tests.persistence.memory_probe import SLOTS as PROBE_SLOTS
from tests.transitions import assert_same

NOISE = spaces.Box(0, 255, (84, 84), np.uint8)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what memory is anonymous")
@pytest.mark.parametrize("saves", [1, 3])
def test_only_what_is_written_takes_memory(saves: int, tmp_path: Path) -> None:
    """After the buffer was overwritten and saved again, too, as in every run with checkpoints."""
    buffer = make_buffer(PROBE_SLOTS)
    fill(buffer, PROBE_SLOTS * 5 // 4)
    for _ in range(saves):
        fill(buffer, 300)
        buffer.save(tmp_path / "buffer")
    raw = PROBE_SLOTS * N_ENVS * 1024
    del buffer
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.persistence.mapping_probe", str(tmp_path / "buffer")]
    found = json.loads(subprocess.run(command, cwd=root, stdout=subprocess.PIPE, timeout=300, check=True).stdout)
    assert found["data"] > raw
    for step in ("load", "read", "add", "grow"):
        assert found[step] < 0.15 * raw, found
    assert found["add more"] < 0.15 * raw + 200 * N_ENVS * 1024, found


def noise_buffer(slots: int = 400) -> Any:
    return CompressedReplayBuffer(
        slots, NOISE, spaces.Discrete(2), "cpu", compression_method="none", frame_stack=None, n_envs=1
    )


def add_noise(buffers: list[Any], rng: np.random.Generator, count: int) -> None:
    for _ in range(count):
        obs, next_obs = rng.integers(0, 256, size=(2, 1, *NOISE.shape), dtype=np.uint8)
        for buffer in buffers:
            buffer.add(obs, next_obs, np.zeros((1, 1)), np.ones(1), np.zeros(1), [{}])


def arena_memory(buffer: Any) -> Any:
    return buffer._stores[""].frames.arena._memory


def assert_equal_contents(one: Any, other: Any) -> None:
    assert (one.pos, one.full) == (other.pos, other.full)
    for name in ("observations", "next_observations"):
        np.testing.assert_array_equal(getattr(one, name)[: one.size()], getattr(other, name)[: one.size()])


@pytest.mark.parametrize("platform", ["linux", "another"])
def test_it_is_mapped_after_any_number_of_saves(platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Linux can move the pages of a map. Elsewhere, the bytes are copied to another temporary file."""
    if platform != "linux":
        monkeypatch.setattr(anonymous_memory, "sys", SimpleNamespace(platform=platform))
    rng, buffer, path = np.random.default_rng(0), noise_buffer(), tmp_path / "buffer"
    for number in range(12):
        add_noise([buffer], rng, 90)
        buffer.save(path)
        loaded: Any = CompressedReplayBuffer.load(path, "cpu", mmap=True)
        assert isinstance(arena_memory(loaded), TemporaryMemory)
        assert_equal_contents(buffer, loaded)
        if number in (3, 7, 11):
            # Overwritten, wrapped round and grown, it goes on as the one in memory, and the file stays as it was.
            size = len(arena_memory(loaded).data)
            add_noise([twin := CompressedReplayBuffer.load(path, "cpu"), loaded], rng, 700)
            assert isinstance(arena_memory(loaded), TemporaryMemory)
            assert len(arena_memory(loaded).data) < 3 * max(size, 800 * 7056)
            assert_equal_contents(twin, loaded)
            assert_equal_contents(buffer, CompressedReplayBuffer.load(path, "cpu"))
            # What was mapped can be saved, and that be mapped.
            loaded.save(tmp_path / "again")
            for mmap in (False, True):
                assert_equal_contents(twin, CompressedReplayBuffer.load(tmp_path / "again", "cpu", mmap=mmap))


def test_a_mapped_file_can_be_saved_to(tmp_path: Path) -> None:
    """By the buffer that maps it, and while another one does."""
    rng, buffer, path = np.random.default_rng(0), noise_buffer(), tmp_path / "buffer"
    add_noise([buffer], rng, 300)
    buffer.save(path)
    mapped: list[Any] = [CompressedReplayBuffer.load(path, "cpu", mmap=True) for _ in range(2)]
    for _ in range(6):
        add_noise([buffer, mapped[0]], rng, 150)
        mapped[0].save(path)
        assert_equal_contents(CompressedReplayBuffer.load(path, "cpu"), buffer)
    first = noise_buffer()
    add_noise([first], np.random.default_rng(0), 300)
    assert_equal_contents(first, mapped[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["CompressedReplayBuffer", "CompressedDictReplayBuffer", "CompressedRolloutBuffer"])
def test_every_method_goes_on_as_in_memory(
    name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small blocks, so that all arrays of a small buffer are mapped, in many pieces."""
    monkeypatch.setattr(container, "BLOCK_BYTES", 4096)
    buffer = make(name, compression_method=method)
    transitions = steps_for(buffer, 5 * SLOTS)
    for number, transition in enumerate(transitions[: 3 * SLOTS]):
        add(buffer, transition, number)
        if number % 17 == 0:
            buffer.save(tmp_path / "buffer")
    buffer.save(tmp_path / "buffer")
    mapped = BaseCompressedBuffer.load(tmp_path / "buffer", "cpu", mmap=True)
    for number, transition in enumerate(transitions[3 * SLOTS :]):
        assert_same(draw(buffer, number), draw(mapped, number))
        add(buffer, transition, number)
        add(mapped, transition, number)
    assert_same(draw(buffer, 0), draw(mapped, 0))


def test_a_copy_of_a_buffer_on_disk_uses_dead_bytes_again(tmp_path: Path) -> None:
    """They are not kept for a flush, because no folder refers to them."""
    disk = CompressedReplayBuffer(
        100, NOISE, spaces.Discrete(2), "cpu", compression_method="none", storage="mmap", path=tmp_path / "folder"
    )
    rng = np.random.default_rng(0)
    add_noise([disk], rng, 150)
    disk.save(tmp_path / "file")
    copy: Any = CompressedReplayBuffer.load(tmp_path / "file", "cpu")
    add_noise([copy], rng, 1500)
    assert copy._stores[""].frames.arena.nbytes < 3 * 200 * 7056


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_changes_nothing_here(tmp_path: Path) -> None:
    rng, buffer = np.random.default_rng(0), noise_buffer()
    add_noise([buffer], rng, 500)
    buffer.save(tmp_path / "buffer")
    mapped = CompressedReplayBuffer.load(tmp_path / "buffer", "cpu", mmap=True)
    child = os.fork()
    if child == 0:
        add_noise([mapped], rng, 450)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert_equal_contents(buffer, mapped)
