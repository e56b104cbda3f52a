"""Counts how often rare events happened in a history, by patching the functions that handle them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np

from sb3_extra_buffers.codecs.chains import ChainCodec
from sb3_extra_buffers.codecs.delta_zstd import DeltaZstdCodec
from sb3_extra_buffers.codecs.zstd_dict import ZstdDictCodec
from sb3_extra_buffers.gpu_buffers.arena import CappedArena
from sb3_extra_buffers.gpu_buffers.device_codecs import DeviceDelta
from sb3_extra_buffers.gpu_buffers.frame_store import DeviceFrameStore
from sb3_extra_buffers.storage.arena import Arena
from sb3_extra_buffers.storage.extent_arena import ExtentArena
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.observation_index import ObservationIndex

Visits = Counter[str]
Look = Callable[..., Any]
"""Called with the object and the arguments before a patched method. The function that it returns is called afterwards,
with the method's result."""

REFERENCES, DICTIONARIES = "reference renewals", "dictionary renewals"
INDEX_GROWTH, INDEX_WRAP = "index growth", "index wraps"
ARENA_GROWTH, ARENA_WRAP, ARENA_MOVES = "arena growth", "arena wraps", "arena growth while wrapped"
REBUILDS, CODEC_CHANGES, RENUMBERINGS = "rebuilds", "codec changes", "renumberings"
PHANTOMS = "unfinished records at a reset"
KINDS = (
    REFERENCES, DICTIONARIES, INDEX_GROWTH, INDEX_WRAP, ARENA_GROWTH, ARENA_WRAP, ARENA_MOVES, REBUILDS, CODEC_CHANGES,
    RENUMBERINGS, PHANTOMS,
)  # fmt: skip


@contextlib.contextmanager
def counted(visits: Visits) -> Iterator[None]:
    """Count rare events in ``visits`` within the block."""

    def references(codec: ChainCodec, *_: Any) -> Look:
        before = codec._current.copy()

        def after(_: Any) -> None:
            old = np.pad(before, (0, len(codec._current) - len(before)))
            visits[REFERENCES] += int(np.count_nonzero((codec._current != old) & (old > 0)))

        return after

    def new_references(codec: DeviceDelta, lanes: Any, *_: Any) -> Look:
        visits[REFERENCES] += int(np.count_nonzero(codec._current[lanes]))
        return _ignore

    def dictionary(codec: ZstdDictCodec) -> Look:
        visits[DICTIONARIES] += bool(codec._current)
        return _ignore

    def delta_dictionary(codec: DeltaZstdCodec) -> Look:
        visits[DICTIONARIES] += bool(codec._n_made)
        return _ignore

    def index(store: FrameStore, *_: Any) -> Look:
        group = store.codec.frames_per_record
        before = store.encoded // group // store.index.capacity
        capacity = store.index.capacity

        def after(_: Any) -> None:
            if store.index.capacity == capacity:
                visits[INDEX_WRAP] += int((store.encoded // group // capacity - before).sum())

        return after

    def allocation(arena: Arena, *_: Any) -> Look:
        wrapped = arena.wrap is not None

        def after(_: Any) -> None:
            visits[ARENA_WRAP] += arena.wrap is not None and not wrapped

        return after

    def allocation_in_extents(arena: ExtentArena, *_: Any) -> Look:
        newest = arena._live[-1][1] if arena._live else 0

        def after(start: int | None) -> None:
            visits[ARENA_WRAP] += start is not None and start < newest

        return after

    def arena_growth(arena: Arena, *_: Any) -> Look:
        visits[ARENA_GROWTH] += 1
        visits[ARENA_MOVES] += not isinstance(arena, ExtentArena) and arena.wrap is not None
        return _ignore

    def counts(kind: str) -> Look:
        def look(*_: Any) -> Look:
            visits[kind] += 1
            return _ignore

        return look

    def clear(store: FrameStore) -> Look:
        visits[PHANTOMS] += bool((store.heads % store.codec.frames_per_record).any())
        return _ignore

    looks: list[tuple[type[Any], str, Look]] = [
        (ChainCodec, "_choose_references", references),
        (DeviceDelta, "use_references", new_references),
        (ZstdDictCodec, "_renew", dictionary),
        (DeltaZstdCodec, "_renew_dictionary", delta_dictionary),
        (FrameStore, "_encode_waiting", index),
        (DeviceFrameStore, "_write_records", index),
        (FrameStore, "_grow_index", counts(INDEX_GROWTH)),
        (Arena, "allocate", allocation),
        (ExtentArena, "allocate", allocation_in_extents),
        (Arena, "grow", arena_growth),
        (ExtentArena, "grow", arena_growth),
        (CappedArena, "grow", arena_growth),
        (ObservationIndex, "rebuild", counts(REBUILDS)),
        (ObservationIndex, "change_codec", counts(CODEC_CHANGES)),
        (ObservationIndex, "renumber", counts(RENUMBERINGS)),
        (FrameStore, "clear", clear),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, look in looks:
            stack.enter_context(patch.object(owner, name, _watched(owner.__dict__[name], look)))
        yield


def _watched(function: Callable[..., Any], look: Look) -> Callable[..., Any]:
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        after = look(self, *args)
        result = function(self, *args, **kwargs)
        after(result)
        return result

    return watched


def _ignore(_: Any) -> None:
    pass
