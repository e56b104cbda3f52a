"""Blocks: the records of a batch, for a process that does not have the store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.errors import MissingPackageError
from sb3_extra_buffers.storage import blocks
from sb3_extra_buffers.storage.blocks import BlockMaker, fill_from
from sb3_extra_buffers.storage.joined import JoinedStores
from tests.compressed.test_segments import fill, make
from tests.methods import installed

pytest.importorskip("numba")
SLOTS, ENVS = np.array([3, 17, 0, 4, 17]), np.array([0, 1, 1, 0, 0])


def block_of(buffer: Any) -> Any:
    maker = BlockMaker(JoinedStores([buffer._stores[""]]))
    return maker.make(np.zeros(len(SLOTS), dtype=np.int64), [(0, SLOTS), (1, SLOTS)], ENVS)


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("delta", "data"), ("bitpack", "data"), ("pixel-lz", "data"),
        ("none", "rows"), ("rle", "rows"), ("zstd-dict", "rows"),
        *((method, "data") for method in installed("delta-zstd")),
    ],
)  # fmt: skip
def test_what_is_sent_is_what_was_stored(method: str, part: str) -> None:
    buffer = make(compression_method=method, frame_stack=4)
    fill(buffer, steps=80)
    block = block_of(buffer)
    assert part in block
    store = buffer._stores[""]
    outs = [np.empty((len(SLOTS), *store.shape), dtype=store.stored_dtype) for _ in range(2)]
    fill_from([(slice(0, len(SLOTS)), block)], store, outs)
    assert (outs[0] == buffer.observations[SLOTS, ENVS]).all()
    assert (outs[1] == buffer.next_observations[SLOTS, ENVS]).all()


def test_no_memory_that_was_never_written_is_sent() -> None:
    buffer = make(compression_method="delta", frame_stack=4)
    fill(buffer, steps=80)
    block = block_of(buffer)
    padding = block["data"][int(block["index"][1].sum()) :]
    assert len(padding) > 0
    assert not padding.any()


def test_frames_of_other_planes_are_sent_as_rows() -> None:
    buffer = make(compression_method="pixel-lz", frame_stack=4)
    buffer._stores[""].codec.planes = 3  # as if a file had brought it
    fill(buffer, steps=80)
    assert "rows" in block_of(buffer)


def test_records_that_others_would_decode_wrongly_are_sent_as_rows() -> None:
    buffer = make(compression_method="bitpack", frame_stack=4)
    codec = buffer._stores[""].codec
    codec.predictors = codec.predictors[[0, 2, 1, *range(3, len(codec.predictors))]]  # as if a file had brought them
    fill(buffer, steps=80)
    assert "rows" in block_of(buffer)


def test_a_learner_without_numba_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make(compression_method="delta", frame_stack=4)
    fill(buffer, steps=80)
    block, store = block_of(buffer), buffer._stores[""]
    monkeypatch.setattr(blocks, "compiled_kernels", lambda *arguments: (None, 0))
    outs = [np.empty((len(SLOTS), *store.shape), dtype=store.stored_dtype) for _ in range(2)]
    with pytest.raises(MissingPackageError, match="Decoding what shards send needs the package 'numba'"):
        fill_from([(slice(0, len(SLOTS)), block)], store, outs)
