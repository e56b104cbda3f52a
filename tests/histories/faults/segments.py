"""Faults of exporting and ingesting segments."""

from __future__ import annotations

from functools import partial

from tests.histories.faults.fault import BOTH, REPLAY, Fault

_Fault = partial(Fault, segments=True)

SEGMENT_FAULTS = [
    _Fault(
        "frames of another lane are copied",
        "storage/segments.py",
        "return Frames([part + firsts for part in ends]",
        "return Frames([part + firsts[::-1] for part in ends]",
        REPLAY,
    ),
    _Fault(
        "a record that is filled up keeps the old frames of the ring",
        "storage/record_copies.py",
        "        frames.heads[lanes] = frames.encoded[lanes] + group\n",
        "        frames.heads[lanes] = frames.encoded[lanes] + group\n        frames.newest.known[:] = True\n",
        BOTH,
    ),
    _Fault(
        "references of the sender are not renumbered",
        "storage/record_copies.py",
        "references = numbers[records.references]",
        "references = records.references",
        REPLAY,
    ),
    _Fault(
        "references of copied records are not counted",
        "storage/record_copies.py",
        "        codec.incref(references)\n",
        "",
        REPLAY,
    ),
    _Fault(
        "a next observation that is no observation is lost",
        "storage/segments.py",
        "differs[:-1] = (later != now).any(axis=2)",
        "differs[:-1] = (later != now).all(axis=2)",
        REPLAY,
    ),
    _Fault(
        "a gap has no boundary",
        "compressed/segments.py",
        "            if not continues:\n",
        "            if not continues and n_steps > self.buffer_size:\n",
        REPLAY,
    ),
    _Fault(
        "priorities of copied transitions are those of the slots before",
        "compressed/prioritized_buffer.py",
        "places = (self.pos + steps)[:, None]",
        "places = (self.pos - 1 + steps)[:, None]",
        ("CompressedPrioritizedReplayBuffer",),
    ),
    _Fault(
        "the last steps of a large segment are lost",
        "compressed/segments.py",
        "{name: row[n_steps - kept :] for name, row in rows.items()}",
        "{name: row[:kept] for name, row in rows.items()}",
        REPLAY,
    ),
]
