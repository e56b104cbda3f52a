"""The invariants of the stores.

They hold between any two operations, also when one of them was interrupted. Each is cheap enough for all of a large
buffer to be checked in seconds; none of them decodes more than the newest observations.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.storage.lanes import numbers_from

if TYPE_CHECKING:
    from sb3_extra_buffers.storage.frame_store import FrameStore
    from sb3_extra_buffers.storage.observation_slots import ObservationSlots

_SLOTS_AT_ONCE = 4096


def check_observations(store: ObservationSlots) -> None:
    """Raise :class:`~sb3_extra_buffers.errors.CorruptDataError` unless every observation leads to frames that exist."""
    frame_stores = store.frame_stores
    for frames in frame_stores:
        frames.check()
    for newer, older in pairwise(frame_stores):
        if (older.heads > newer.base).any():
            raise CorruptDataError("Two codecs have frames of the same number.")
    stack = store.layout.stack
    bounds = [(frames.first_records * frames.codec.frames_per_record + stack, frames.heads) for frames in frame_stores]
    for column, ends in enumerate(store.ends):
        for i in range(0, store.slots_used, _SLOTS_AT_ONCE):
            piece = ends[i : min(i + _SLOTS_AT_ONCE, store.slots_used)]
            exists = piece == 0
            for lowest, highest in bounds:
                exists |= (piece >= lowest) & (piece <= highest)
            if not exists.all():
                slot, env = np.argwhere(~exists)[0].tolist()
                raise CorruptDataError(
                    f"The observation in column {column}, slot {i + slot}, environment {env} leads to frames before "
                    f"number {piece[slot, env]} that are not there."
                )


def check_frames(store: FrameStore) -> None:
    """Raise :class:`~sb3_extra_buffers.errors.CorruptDataError` if anything in ``store`` contradicts something else."""
    check_numbers(store)
    group, capacity = store.codec.frames_per_record, store.starts.shape[1]
    stops = store.encoded // group
    lanes, numbers = numbers_from(store.first_records, stops - store.first_records)
    places = lanes * capacity + numbers % capacity
    starts, lengths = store.starts.reshape(-1)[places], store.lengths.reshape(-1)[places].astype(np.int64)
    wrong = (lengths < store.codec.min_encoded_size) | (lengths > store.codec.max_encoded_size)
    if wrong.any():
        at = int(wrong.argmax())
        raise CorruptDataError(
            f"Record {numbers[at]} of lane {lanes[at]} has {lengths[at]} bytes, which no record of the method "
            f"{store.codec.label!r} has."
        )
    store.arena.check(starts, lengths)
    backwards = (np.diff(store.arena.distance(starts)) <= 0) & (np.diff(lanes) == 0)
    if backwards.any():
        at = int(backwards.argmax())
        raise CorruptDataError(f"Record {numbers[at + 1]} of lane {lanes[at]} lies before the one before it.")
    store.codec.check(store.references_of(store.first_records, stops))
    _check_newest(store)


def check_numbers(store: FrameStore) -> None:
    """Compiled code trusts these numbers, so none of them may lead astray."""
    group, capacity = store.codec.frames_per_record, store.starts.shape[1]
    waiting, stops = store.heads - store.encoded, store.encoded // group
    right = (
        (store.first_records >= 0)
        & (store.first_records <= stops)
        & (stops - store.first_records <= capacity)
        & (store.encoded % group == 0)
        & (waiting >= 0)
        & (waiting <= store.ring.shape[1])
        & (store.heads <= np.iinfo(np.uint32).max)
        & (store.base <= store.first_records * group)
    )
    if capacity == 0 or not right.all():
        lane = int(right.argmin())
        raise CorruptDataError(
            f"The numbers of lane {lane} contradict each other: {store.heads[lane]} frames, {store.encoded[lane]} of "
            f"them in records of {group}, from record {store.first_records[lane]} on, in an index of {capacity}."
        )


def _check_newest(store: FrameStore) -> None:
    """What the next observation will be compared with must be what is stored."""
    lanes = np.flatnonzero(store.newest.known)
    firsts = store.heads[lanes] - store.layout.stack
    if (firsts < store.first_records[lanes] * store.codec.frames_per_record).any():
        raise CorruptDataError("Frames of the newest observation, which the next one may share, are gone.")
    if len(lanes) == 0:
        return
    stored = np.empty((len(lanes), store.layout.stack, store.codec.frame.nbytes), dtype=np.uint8)
    store.gather(lanes, firsts[None], [stored])
    differs = (stored != store.newest.frames(lanes)).any(axis=(1, 2))
    if differs.any():
        raise CorruptDataError(f"The newest observation of lane {lanes[differs.argmax()]} is not what is stored.")
