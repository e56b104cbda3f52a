"""Reading observations: from the record index and the bytes of the arena back to arrays.

There is one frame store for each codec that holds observations. When ``auto`` changes to another codec, stored
observations keep theirs until they are overwritten, so one batch may need frames of several stores.

Frames are gathered by a compiled kernel, if there is one for the codec; see :mod:`.compiled_gathering`. Otherwise the
codec decodes whole records, and frames are copied out of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.parallel import run_in_slices
from sb3_extra_buffers.storage import compiled_gathering
from sb3_extra_buffers.storage.compiled_gathering import GatheredFrames, fill_frames
from sb3_extra_buffers.storage.stacking import StackLayout

_CACHE_BYTES = 2 << 20
"""Roughly how many bytes of decoded data fit into a core's cache."""
_thread = threading.local()


def gather_observations(
    stores: Sequence[GatheredFrames], layout: StackLayout, lanes: Indices, firsts: Indices, outs: list[npt.NDArray[Any]]
) -> None:
    """Fill ``outs`` with the observations that begin at the frames ``firsts``.

    :param stores: The frame stores, the newest first.
    """
    if len(stores) == 1:
        fill_frames(layout, outs, lambda frames: stores[0].gather(lanes, firsts, frames))
    else:
        fill_frames(layout, outs, lambda frames: _gather_from_several(stores, lanes, firsts, frames))


def gather_runs(
    stores: Sequence[GatheredFrames], layout: StackLayout, lanes: Indices, firsts: Indices, outs: list[npt.NDArray[Any]]
) -> None:
    """Like :func:`gather_observations`, but faster for consecutive observations, such as those of sequences.

    Each record is decoded once per batch.
    """
    if stores[0].codec.record_format == "raw":  # there is nothing to decode
        gather_observations(stores, layout, lanes, firsts, outs)
        return

    def gather(frames: list[Bytes]) -> None:
        left = np.arange(len(lanes))
        if layout.stack == len(frames) == 1:
            left = left[_gather_unbroken(stores[0], lanes, firsts[0], frames[0])]
        for store, columns, found in rows_by_store(stores, lanes[left], firsts[:, left]):
            rows = left[found]
            _gather_records(store, lanes[rows], firsts[columns, rows], frames[columns], rows)

    fill_frames(layout, outs, gather)


def _gather_unbroken(store: GatheredFrames, lanes: Indices, firsts: Indices, out: Bytes) -> npt.NDArray[np.bool_]:
    """Decode sequences of consecutive frames straight into ``out``, and return which rows are left.

    All sequences of a batch have one length, which is taken to be the most frequent length of a run of frames.
    Sequences that are broken, for example by the end of an episode, are left to the caller.
    """
    n, goes_on = len(lanes), (lanes[1:] == lanes[:-1]) & (firsts[1:] == firsts[:-1] + 1)
    length = int(np.bincount(np.diff(np.flatnonzero(~goes_on), prepend=-1, append=n - 1)).argmax())
    if length == 1 or n % length:
        return np.ones(n, dtype=np.bool_)
    begins = np.arange(0, n, length)
    is_unbroken = np.logical_and.reduceat(np.append(goes_on, True) | (np.arange(n) % length == length - 1), begins)
    is_unbroken &= firsts[begins] >= store.base[lanes[begins]]
    if is_unbroken.any():
        # Broken sequences get the frames of an unbroken one here, and are overwritten later.
        chosen = np.where(is_unbroken, begins, begins[is_unbroken.argmax()])
        store.gather(lanes[chosen], firsts[None, chosen], [out.reshape(len(begins), length, -1)])
    return np.repeat(~is_unbroken, length)


def _gather_records(store: GatheredFrames, lanes: Indices, firsts: Indices, outs: list[Bytes], rows: Indices) -> None:
    """Decode the records of one store that some rows need, and copy frames from them."""
    group, frame_bytes, n_lanes = store.codec.frames_per_record, store.codec.frame.nbytes, len(store.base)
    numbers = firsts[:, :, None] + np.arange(outs[0].shape[1])
    records, where = np.unique(numbers // group * n_lanes + lanes[:, None], return_inverse=True)
    decoded = scratch(len(records) * group * frame_bytes, "runs").reshape(len(records), group, frame_bytes)
    store.gather(records % n_lanes, (records // n_lanes * group)[None], [decoded])
    frames = decoded.reshape(-1, frame_bytes)
    for sources, out in zip(where.reshape(numbers.shape) * group + numbers % group, outs, strict=True):
        if len(rows) == len(out):
            np.take(frames, sources.reshape(-1), axis=0, out=out.reshape(-1, frame_bytes), mode="clip")
        else:
            out[rows] = frames[sources]


def _gather_from_several(stores: Sequence[GatheredFrames], lanes: Indices, firsts: Indices, outs: list[Bytes]) -> None:
    newest = stores[0]
    is_new = (firsts >= newest.base[lanes]).all(axis=0)
    if is_new.all():
        newest.gather(lanes, firsts, outs)
        return
    if is_new.any():
        # Rows that are not in this store get frames of another row here, and are overwritten below.
        rows = np.where(is_new, np.arange(len(lanes)), is_new.argmax())
        newest.gather(lanes[rows], np.ascontiguousarray(firsts[:, rows]), outs)
    left = np.flatnonzero(~is_new)
    for store, columns, found_rows in rows_by_store(stores, lanes[left], firsts[:, left]):
        rows = left[found_rows]
        found = [np.empty((len(rows), *out.shape[1:]), dtype=np.uint8) for out in outs[columns]]
        store.gather(lanes[rows], np.ascontiguousarray(firsts[columns, rows]), found)
        for part, out in zip(found, outs[columns], strict=True):
            out[rows] = part


def rows_by_store(
    stores: Sequence[GatheredFrames], lanes: Indices, firsts: Indices
) -> Iterator[tuple[GatheredFrames, slice, Indices]]:
    """Find the rows of a batch that each store has. Yields stores, columns and rows.

    Rows whose columns are all in one store come with all columns, other rows with one column at a time.
    """
    homes: Indices = np.zeros(firsts.shape, dtype=np.int64)
    for store in stores[:-1]:
        homes += firsts < store.base[lanes]
    are_together = (homes == homes[0]).all(axis=0)
    for i, store in enumerate(stores):
        rows = np.flatnonzero(are_together & (homes[0] == i))
        if len(rows):
            yield store, slice(None), rows
        # The others have an observation in one store and its successor in another.
        for column in range(len(firsts)) if not are_together.all() else ():
            rows = np.flatnonzero(~are_together & (homes[column] == i))
            if len(rows):
                yield store, slice(column, column + 1), rows


def gather_frames(store: GatheredFrames, lanes: Indices, firsts: Indices, outs: list[Bytes]) -> None:
    """Fill batches with runs of consecutive frames.

    Row ``b`` of the ``(n, stack, frame_bytes)`` array ``outs[i]`` gets the frames from number ``firsts[i, b]`` on of
    lane ``lanes[b]``. If several batches are passed together, frames that they share (as an observation and its
    successor do) are decoded once.
    """
    if not compiled_gathering.gather_frames(store, lanes, firsts, outs):
        _gather_whole_records(store, lanes, firsts, outs)


def _gather_whole_records(store: GatheredFrames, lanes: Indices, firsts: Indices, outs: list[Bytes]) -> None:
    """Decode each record once, then copy frames from it, in slices of rows whose records fit into a core's cache."""
    bytes_per_row = store.codec.record_bytes * (2 + len(outs) * outs[0].shape[1] // store.codec.frames_per_record)
    run_in_slices(
        lambda low, high: _gather_slice(store, lanes[low:high], firsts[:, low:high], [out[low:high] for out in outs]),
        len(lanes),
        sum(out.nbytes for out in outs),
        largest=max(8, _CACHE_BYTES // max(bytes_per_row, 1)),
    )


def _gather_slice(store: GatheredFrames, lanes: Indices, firsts: Indices, outs: list[Bytes]) -> None:
    codec, group = store.codec, store.codec.frames_per_record
    steps = np.arange(outs[0].shape[1])
    wanted = (firsts.T[:, :, None] + steps).reshape(len(lanes), -1)
    lanes = np.broadcast_to(lanes[:, None], wanted.shape)
    waiting = wanted >= store.encoded[lanes]
    places = store.index.places(lanes, wanted // group)
    records, rows = np.unique(places[~waiting], return_inverse=True)
    n_decoded, n_waiting = len(records) * group, int(np.count_nonzero(waiting))
    frames = scratch((n_decoded + n_waiting) * codec.frame.nbytes).reshape(-1, codec.frame.nbytes)
    if n_decoded:
        codec.decode(
            store.arena.data,
            *store.index.entries(records),
            frames[:n_decoded].reshape(len(records), codec.record_bytes),
        )
    frames[n_decoded:] = store.ring[lanes[waiting], wanted[waiting] % store.ring.shape[1]]
    sources = np.empty(wanted.shape, dtype=np.int64)
    sources[~waiting] = rows * group + wanted[~waiting] % group
    sources[waiting] = np.arange(n_decoded, len(frames))
    for i, out in enumerate(outs):
        chosen = sources[:, i * len(steps) : (i + 1) * len(steps)].reshape(-1)
        np.take(frames, chosen, axis=0, out=out.reshape(-1, out.shape[-1]), mode="clip")


def scratch(size: int, user: str = "records") -> Bytes:
    """Memory to decode into. Each thread reuses its own, because fresh memory costs a page fault per 4 kB.

    :param user: A name. Functions that use the memory at the same time need different names.
    """
    kept: Bytes | None = getattr(_thread, user, None)
    if kept is None or len(kept) < size:
        kept = np.empty(max(size, _CACHE_BYTES), dtype=np.uint8)
        setattr(_thread, user, kept)
    return kept[:size]
