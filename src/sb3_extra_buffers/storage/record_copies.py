"""Copying records from one frame store to another without decoding them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import xxhash

from sb3_extra_buffers.codecs.base import NO_REFERENCE, Bytes, Encoded, Indices
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.stacking import numbers_from

_MOST_FRAMES = 1 << 30
"""The most frames of one lane in a segment that is taken for valid."""


class Records(NamedTuple):
    """Consecutive records of all lanes, lane by lane."""

    counts: Indices
    """The number of records of each lane."""
    lengths: Indices
    references: Indices
    """For each record, the position of its reference in ``digests``, counted from 1; 0 for none."""
    digests: list[str]
    """The checksums of all references that the records need."""
    contents: Mapping[str, Bytes]
    """References by checksum; at least those that the receiver does not have."""
    data: Bytes


def seal(frames: FrameStore, oldest: Callable[[], Indices]) -> None:
    """Put all frames into records. Unfinished records are filled up by repeating the newest frame of their lane."""
    while frames._encode_waiting(oldest):
        pass
    waiting = frames.heads - frames.encoded
    lanes = np.flatnonzero(waiting)
    if len(lanes):
        group, size = frames.codec.frames_per_record, frames.ring.shape[1]
        frames.newest.forget()  # its frames are no longer the last ones of their lane
        for lane in lanes.tolist():
            head = int(frames.heads[lane])
            places = np.arange(head, frames.encoded[lane] + group) % size
            frames.ring[lane, places] = frames.ring[lane, (head - 1) % size]
        frames.heads[lanes] = frames.encoded[lanes] + group
        frames._encode_waiting(oldest)
    frames._most_waiting = 0


def take_records(frames: FrameStore, firsts: Indices) -> Records:
    """The records from ``firsts`` on of each lane. All frames must be in records."""
    counts = frames.encoded // frames.codec.frames_per_record - firsts
    lanes, numbers = numbers_from(firsts, counts)
    starts, lengths, references = frames.index.entries(frames.index.places(lanes, numbers))
    used, references = np.unique(references, return_inverse=True)
    has_none = len(used) > 0 and used[0] == NO_REFERENCE
    contents: dict[str, Bytes] = {}
    digests = []
    for number in used[int(has_none) :].tolist():
        content = frames.codec.reference_content(number)
        digests.append(xxhash.xxh3_128_hexdigest(content.data))
        contents[digests[-1]] = content
    data = frames.arena.data
    pieces = [data[start:end] for start, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]
    return Records(
        counts,
        lengths,
        references.reshape(-1) + (0 if has_none else 1),
        digests,
        contents,
        np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint8),
    )


def append_records(frames: FrameStore, records: Records, oldest: Callable[[], Indices]) -> Indices:
    """Copy records to the end of their lanes, and return the number of each lane's first new frame.

    No observation refers to these frames yet. So if this fails, all observations are as before.
    """
    seal(frames, oldest)
    group, codec = frames.codec.frames_per_record, frames.codec
    try:
        numbers = np.array([NO_REFERENCE, *(_number_of(frames, digest, records) for digest in records.digests)])
        references = numbers[records.references]
        most = int(records.counts.max(initial=0))
        stops = frames.encoded // group
        frames._make_index_room(stops + most, oldest)
        if len(records.data):
            lanes, places = numbers_from(stops, records.counts)
            frames.write_records(lanes, places, Encoded(records.data, records.lengths, references), oldest)
        codec.incref(references)
        frames.newest.forget()
        firsts, heads = frames.encoded, frames.encoded + records.counts * group
        frames.heads, frames.encoded = heads, heads.copy()  # from now on, the records are in their lanes
        held = {digest: frames.held[digest] for digest in records.digests}
        gone = [number for digest, number in frames.held.items() if digest not in held]
        frames.held = held
        codec.release(np.array(gone, dtype=np.int64))
    except BaseException:
        frames._recount_uses()
        raise
    return firsts


def _number_of(frames: FrameStore, digest: str, records: Records) -> int:
    """The number of a reference in this store, which imports it if it is new."""
    if digest not in frames.held:
        frames.held[digest] = frames.codec.import_reference(records.contents[digest])
    return frames.held[digest]


def state_of(records: Records, known: set[str]) -> State:
    """Records as values and arrays, without the references that the receiver knows."""
    return {
        "counts": records.counts.astype(np.uint32),
        "lengths": records.lengths.astype(np.uint32),
        "references": records.references.astype(np.uint16 if len(records.digests) < 1 << 16 else np.uint32),
        "digests": records.digests,
        "contents": {digest: content for digest, content in records.contents.items() if digest not in known},
        "data": records.data,
    }


def restored(state: SavedState, n_lanes: int, frames_per_record: int, known: Mapping[str, Bytes]) -> Records:
    """Validate what :func:`state_of` returned, except for what only the codec can check."""
    counts = state.array("counts", np.uint32, (n_lanes,)).astype(np.int64)
    lengths = state.array("lengths", np.uint32, (None,)).astype(np.int64)
    dtype = np.uint32 if state.dtype("references") == np.uint32 else np.uint16
    references = state.array("references", dtype, lengths.shape).astype(np.int64)
    digests = state.value("digests")
    data = state.array("data", np.uint8, (None,))
    if counts.sum() != len(lengths) or counts.max(initial=0) * frames_per_record > _MOST_FRAMES:
        raise state.error("counts", f"are {counts.tolist()} for {len(lengths)} records")
    if lengths.sum() != len(data):
        raise state.error("lengths", f"add up to {lengths.sum()} for {len(data)} bytes")
    if not isinstance(digests, list) or not all(isinstance(digest, str) for digest in digests):
        raise state.error("digests", "must be a list of checksums")
    if references.max(initial=0) > len(digests):
        raise state.error("references", f"name one of {len(digests)}")
    contents = {digest: known[digest] for digest in digests if digest in known}
    sent = state.part("contents")
    for digest in sent.array_names():
        content = sent.array(digest, np.uint8, (None,))
        if xxhash.xxh3_128_hexdigest(content.data) != digest:
            raise sent.error(digest, "does not agree with its checksum")
        contents[digest] = content
    if any(digest not in contents for digest in digests):
        raise missing_references()
    return Records(counts, lengths, references, digests, contents, data)


def missing_references() -> CorruptDataError:
    """The error for a segment that continues one that has not arrived."""
    return CorruptDataError(
        "The segment needs references that an earlier segment has brought, but this buffer has not received. Let the "
        "sender begin anew: export_segment(restart=True)."
    )
