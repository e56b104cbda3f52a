"""Saving, loading and copying a CompressedStorage by each of the ways that TorchRL has."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path

import pytest
import torch as th

from sb3_extra_buffers.errors import CorruptDataError
from tests.neighbours.torchrl_buffers import assert_equal, filled, new_buffer

# Where TorchRL is missing, the import above skips these tests.
# isort: split
from tensordict import assert_allclose_td

pytestmark = pytest.mark.filterwarnings("default")  # TorchRL has warnings of its own


@pytest.mark.parametrize("way", ["dumps", "state_dict", "torch.save", "pickle", "deepcopy"])
def test_saving(way: str, tmp_path: Path) -> None:
    ours, theirs, game = filled()
    copied = new_buffer()
    if way == "dumps":
        ours.dumps(tmp_path / "buffer")
        copied.loads(tmp_path / "buffer")
    elif way == "state_dict":
        copied.load_state_dict(ours.state_dict())
    elif way == "torch.save":
        th.save(ours.state_dict(), tmp_path / "buffer.pt")
        copied.load_state_dict(th.load(tmp_path / "buffer.pt", weights_only=True))
    elif way == "pickle":
        copied._storage = pickle.loads(pickle.dumps(ours.storage))
    else:
        copied._storage = copy.deepcopy(ours.storage)
    copied._writer.register_storage(copied._storage)
    copied._writer._cursor = ours._writer._cursor
    assert len(copied) == 100
    assert_equal(copied[:], theirs[:])
    batch = game.steps(30)
    for buffer in (copied, theirs):
        buffer.extend(batch.clone())
    assert_equal(copied[:], theirs[:])
    copied.storage.check()
    ours.storage.check()


def test_saving_again_replaces_what_was_saved(tmp_path: Path) -> None:
    ours, theirs, game = filled()
    ours.dumps(tmp_path / "buffer")
    batch = game.steps(30)
    for buffer in (ours, theirs):
        buffer.extend(batch.clone())
    ours.dumps(tmp_path / "buffer")
    loaded = new_buffer()
    loaded.extend(game.steps(3))  # loading replaces it
    loaded.loads(tmp_path / "buffer")
    assert_equal(loaded[:], theirs[:])


@pytest.mark.parametrize("way", ["dumps", "state_dict"])
def test_loading_what_a_lazy_tensor_storage_has_saved(way: str, tmp_path: Path) -> None:
    _, theirs, _ = filled()
    loaded = new_buffer()
    if way == "dumps":
        theirs.dumps(tmp_path / "buffer")
        loaded.loads(tmp_path / "buffer")
    else:
        loaded.load_state_dict(theirs.state_dict())
    assert_equal(loaded[:], theirs[:])
    assert len(loaded.storage._compressed) == 2


def test_another_storage_refuses_our_state_dict() -> None:
    ours, theirs, _ = filled()
    with pytest.raises(TypeError):
        theirs.load_state_dict(ours.state_dict())


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    ours, _, _ = filled()
    ours.dumps(tmp_path / "buffer")
    (file,) = (tmp_path / "buffer").rglob("compressed")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptDataError):
        new_buffer().loads(tmp_path / "buffer")


def test_it_cannot_go_to_another_process() -> None:
    from multiprocessing.context import set_spawning_popen

    ours, _, _ = filled()
    set_spawning_popen(object())
    try:
        with pytest.raises(RuntimeError, match="Create the buffer in the process that uses it"):
            pickle.dumps(ours.storage)
    finally:
        set_spawning_popen(None)
    with warnings.catch_warnings():
        pickle.dumps(ours.storage)
    assert_allclose_td(ours[:5].clone(), ours[:5].clone())
