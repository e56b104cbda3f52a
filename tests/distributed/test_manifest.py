"""A buffer of several parts is saved and loaded as a whole, wherever its parts are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.compressed import CompressedPrioritizedReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.distributed import ShardedReplayBuffer
from sb3_extra_buffers.distributed import manifest as manifest_module
from sb3_extra_buffers.errors import ArgumentError, ConfigurationError, CorruptDataError, ExtraBuffersError
from sb3_extra_buffers.persistence import container
from sb3_extra_buffers.persistence.container import Container
from tests.distributed.test_sharded_buffer import VECTORS, filled, make, steps
from tests.distributed.test_shards import transport_of
from tests.transitions import assert_same

REMOTE: dict[str, Any] = {"placement": "shards", "in_process": True, "prefetch": 1}
PLACES: dict[str, dict[str, Any]] = {"learner": {}, "shards": REMOTE}


def batches_of(buffer: Any) -> tuple[Any, ...]:
    np.random.seed(0)
    return tuple(tuple(buffer.sample(32)) for _ in range(3))


def local_parts(buffer: Any) -> list[Any]:
    if buffer._shards is None:
        return list(buffer.parts)
    buffer._shards.ask_all("states")  # so that all has arrived
    shards = transport_of(buffer).shards
    return [part for shard in shards for part in shard._buffers]


@pytest.mark.parametrize("options", [{}, {"buffer_class": CompressedPrioritizedReplayBuffer, "alpha": 0.5}], ids=str)
@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("target", PLACES)
def test_a_saved_buffer_is_the_same(source: str, target: str, options: dict[str, Any], tmp_path: Path) -> None:
    buffer = filled((40, 310, 7), **PLACES[source], **options)
    if options:
        batch = buffer.sample(64)
        buffer.update_priorities(batch.indices, np.linspace(0, 3, 64))
    buffer.save(tmp_path)
    loaded = ShardedReplayBuffer.load(tmp_path, device="cpu", **PLACES[target])
    assert [part.size() for part in loaded.parts] == [part.size() for part in buffer.parts]
    if options:  # the sums of priorities of shards are only known after the first reply
        for ours, theirs in zip(local_parts(loaded), local_parts(buffer), strict=True):
            np.testing.assert_array_equal(ours._tree._nodes, theirs._tree._nodes)
        assert loaded.sample(32).rewards.shape == (32, 1)
    else:
        assert_same(batches_of(buffer), batches_of(loaded))
    loaded.check()
    for step in steps(5):
        loaded.add(*step, part=1)
    loaded.save(tmp_path)
    assert ShardedReplayBuffer.load(tmp_path, device="cpu").size() == loaded.size()


@pytest.mark.parametrize("place", PLACES)
def test_a_save_that_is_interrupted_leaves_the_one_before(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = filled((40, 60, 7), **PLACES[place])
    for _ in range(3):
        buffer.save(tmp_path)
        before = batches_of(ShardedReplayBuffer.load(tmp_path, device="cpu"))
        for step in steps(20, seed=5):
            buffer.add(*step, part=1)
        saves: list[Path] = []
        original = CompressedReplayBuffer.save

        def save(self: Any, path: Any, saves: Any = saves, original: Any = original, **kwargs: Any) -> None:
            if len(saves) == 2:
                raise KeyboardInterrupt
            saves.append(path)
            original(self, path, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(CompressedReplayBuffer, "save", save)
            with pytest.raises(KeyboardInterrupt):
                buffer.save(tmp_path)
        assert len(saves) == 2
        assert_same(batches_of(ShardedReplayBuffer.load(tmp_path, device="cpu")), before)
        with monkeypatch.context() as patch:
            patch.setattr(container, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                manifest_module.write_manifest(tmp_path, manifest_module.read_manifest(tmp_path))
        assert_same(batches_of(ShardedReplayBuffer.load(tmp_path, device="cpu")), before)


def test_a_shard_without_files_of_its_own_is_restored_from_the_last_save(tmp_path: Path) -> None:
    buffer = filled((40, 60), **REMOTE)
    buffer.save(tmp_path)
    for step in steps(20, seed=5):
        buffer.add(*step, part=1)
    buffer.sample(8)
    transport_of(buffer).kill(1)
    buffer.sample(8)
    while buffer.shard_statistics["fraction_lost"] == 0:
        buffer.sample(8)
    assert [part.size() for part in buffer.parts] == [40, 60]
    buffer.check()


def rewritten(folder: Path, change: Any) -> None:
    """A manifest that was forged: its checksums are right."""
    path = folder / "manifest"
    with Container.open(path) as file:
        meta = json.loads(json.dumps(file.meta))
    change(meta)
    path.unlink()
    container.write(path, meta, {})


FORGERIES: dict[str, Any] = {
    "another version": lambda meta: meta["parts"].update(version=99),
    "no version": lambda meta: meta["parts"].pop("version"),
    "a path": lambda meta: meta["parts"].update(turn="a/../../etc/passwd"),
    "no parts": lambda meta: meta["parts"].update(parts=0, positions=[], full=[]),
    "too many parts": lambda meta: meta["parts"].update(parts=1 << 40),
    "more parts than files": lambda meta: meta["parts"].update(parts=4, positions=[1] * 4, full=[False] * 4),
    "wrong positions": lambda meta: meta["parts"].update(positions=[1, 2, 3]),
    "positions of another kind": lambda meta: meta["parts"].update(positions=["x", 2, 3]),
    "negative positions": lambda meta: meta["parts"].update(positions=[-40, 2, 3]),
    "another class": lambda meta: meta.update({"class": "CompressedRolloutBuffer"}),
    "no class": lambda meta: meta.update({"class": "os.system"}),
    "a folder": lambda meta: meta["arguments"].update(storage="mmap", path="/tmp"),
    "other arguments": lambda meta: meta["arguments"].update(buffer_size="all"),
    "no priority": lambda meta: meta["parts"].update(max_priority="high"),
    "other environments": lambda meta: meta["arguments"].update(n_envs=1),
    "no environments": lambda meta: meta["arguments"].pop("n_envs"),
    "a list": lambda meta: meta.update(parts=[1, 2]),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_manifest_is_refused(forgery: str, place: str, tmp_path: Path) -> None:
    filled((10, 12, 7)).save(tmp_path)
    rewritten(tmp_path, FORGERIES[forgery])
    with pytest.raises((ExtraBuffersError, FileNotFoundError)):
        ShardedReplayBuffer.load(tmp_path, device="cpu", **PLACES[place])


@pytest.mark.parametrize("place", PLACES)
def test_parts_of_another_buffer_are_refused(place: str, tmp_path: Path) -> None:
    filled((10, 12, 7)).save(tmp_path / "one")
    filled((10, 12, 7), VECTORS).save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "part1.a", tmp_path / "one" / "part1.a")
    with pytest.raises(CorruptDataError, match="part1"):
        ShardedReplayBuffer.load(tmp_path / "one", device="cpu", **PLACES[place])
    damaged = tmp_path / "other" / "manifest"
    damaged.write_bytes(damaged.read_bytes()[:-7])
    with pytest.raises(CorruptDataError):
        ShardedReplayBuffer.load(tmp_path / "other", device="cpu", **PLACES[place])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("option", ["parts", "buffer_size", "shard"])
def test_options_that_load_does_not_have(option: str, place: str, tmp_path: Path) -> None:
    filled((10, 12, 7)).save(tmp_path)
    with pytest.raises(ArgumentError, match=f"{option!r}.* placement, shards, prefetch,"):
        ShardedReplayBuffer.load(tmp_path, device="cpu", **PLACES[place], **{option: 2})


@pytest.mark.parametrize(("option", "value"), [("shards", "two"), ("prefetch", True), ("on_loss", "cry")])
def test_wrong_values_of_options_are_not_taken_for_a_damaged_file(option: str, value: Any, tmp_path: Path) -> None:
    filled((10, 12, 7)).save(tmp_path)
    with pytest.raises(ConfigurationError, match=f"{option} must be .*{value!r}"):
        ShardedReplayBuffer.load(tmp_path, device="cpu", **REMOTE | {option: value})


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="manifest"):
        ShardedReplayBuffer.load(tmp_path)
    make(CompressedReplayBuffer).save(tmp_path / "manifest")
    with pytest.raises(ExtraBuffersError, match="saved buffer"):
        ShardedReplayBuffer.load(tmp_path)
