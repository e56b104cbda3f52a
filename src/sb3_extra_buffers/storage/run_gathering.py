"""Gathering for batches of sequences, whose observations share most of their records: each record is decoded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.storage.gathering import RecordIndex, compiled_kernels, gather_observations, scratch
from sb3_extra_buffers.storage.stacking import StackLayout

_LONGEST_PIECE = 32
"""Longer runs are halved, so that there are enough pieces for several threads."""


def gather_runs(
    stores: Sequence[RecordIndex],
    layout: StackLayout,
    lanes: Indices,
    firsts: Indices,
    outs: list[npt.NDArray[Any]],
    length: int,
    time_first: bool,
) -> None:
    """The same as :func:`.gathering.gather_observations`, faster where observations follow one another.

    :param length: How many rows make a sequence.
    :param time_first: Whether the first steps of all sequences come first, then the second steps of all, and so on.
    """
    codec, n, stack = stores[0].codec, len(lanes), layout.stack
    if codec.record_format == "raw" or stack * codec.frames_per_record == 1:  # there is nothing to decode twice
        gather_observations(stores, layout, lanes, firsts, outs)
        return
    frames = [
        out.reshape(n, stack, layout.frame.size).view(np.uint8)
        if layout.is_contiguous
        else np.empty((n, stack, layout.frame.nbytes), dtype=np.uint8)
        for out in outs
    ]
    left = np.arange(n)
    # Only kernels write a sequence to rows that are not next to each other.
    if len(outs) == 1 and length > 1 and n % length == 0 and (not time_first or compiled_kernels(codec)[0]):
        left = _gather_unbroken(stores[0], lanes, firsts[0], frames[0], length, time_first)
    homes = _homes(stores, lanes[left], firsts[:, left])
    for i, store in enumerate(stores):
        here = left[(homes == i).all(axis=0)]
        if len(here):
            _gather_records(store, lanes[here], firsts[:, here], frames, here)
    left = left[(homes != homes[0]).any(axis=0)]
    if len(left):  # an observation in one store, its next one in another
        parts = [np.empty((len(left), *out.shape[1:]), dtype=out.dtype) for out in outs]
        gather_observations(stores, layout, lanes[left], np.ascontiguousarray(firsts[:, left]), parts)
    if not layout.is_contiguous:
        for source, out in zip(frames, outs, strict=True):
            layout.merge(source, out)
    if len(left):
        for part, out in zip(parts, outs, strict=True):
            out[left] = part


def _homes(stores: Sequence[RecordIndex], lanes: Indices, firsts: Indices) -> Indices:
    """For each observation, which of the stores, the newest first, has its frames."""
    homes: Indices = np.zeros(firsts.shape, dtype=np.int64)
    for store in stores[:-1]:
        homes += firsts < store.base[lanes]
    return homes


def _gather_unbroken(
    store: RecordIndex, lanes: Indices, firsts: Indices, out: Bytes, length: int, time_first: bool
) -> Indices:
    """Decode sequences in which every observation adds one frame, as nearly all do, and return the other rows."""

    def by_sequence(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if time_first:
            return rows.reshape(length, -1, *rows.shape[1:]).swapaxes(0, 1)
        return rows.reshape(-1, length, *rows.shape[1:])

    rows, lanes, firsts, out = (by_sequence(part) for part in (np.arange(len(lanes)), lanes, firsts, out))
    stack, frame_bytes = out.shape[2:]
    is_unbroken = ((firsts[:, 1:] - firsts[:, :-1] == 1) & (lanes[:, 1:] == lanes[:, :-1])).all(axis=1)
    lanes = lanes[:, 0].copy()
    is_unbroken &= firsts[:, 0] >= store.base[lanes]
    chosen = np.flatnonzero(is_unbroken)
    if stack == 1:
        halves = 1
        while not time_first and length // halves > _LONGEST_PIECE and length % (2 * halves) == 0:
            halves *= 2
        piece = length // halves
        for block in np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1):
            if len(block):
                target = out[block[0] : block[-1] + 1, :, 0]
                pieces = target if halves == 1 else target.reshape(-1, piece, frame_bytes)
                begins = np.ascontiguousarray(firsts[block, ::piece]).reshape(1, -1)
                store.gather(np.repeat(lanes[block], halves), begins, [pieces])
    elif len(chosen):
        width = length + stack - 1
        decoded = scratch(len(chosen) * width * frame_bytes, "runs").reshape(-1, width, frame_bytes)
        store.gather(lanes[chosen], np.ascontiguousarray(firsts[chosen, :1]).reshape(1, -1), [decoded])
        windows = sliding_window_view(decoded, stack, axis=1).swapaxes(2, 3)
        for i, window in zip(chosen.tolist(), windows, strict=True):
            out[i] = window
    left: Indices = np.sort(rows[~is_unbroken], axis=None)
    return left


def _gather_records(store: RecordIndex, lanes: Indices, firsts: Indices, outs: list[Bytes], rows: Indices) -> None:
    """Decode the records that some rows need, all of one store, and copy their frames."""
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
