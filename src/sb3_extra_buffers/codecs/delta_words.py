"""``delta`` as 1.0.0.dev0 and buffers on a GPU write it: the words that changed since the previous frame.

A record is a chain of frames. Each is stored as the words that differ from its predecessor, the first as those that
differ from the lane's *reference frame*. Words are 4 bytes of the frame, whatever its dtype, so the method is exact
for all of them. A record consists of

* per frame, a ``uint32``: the number of its changes, and in the two highest bits the frame that they apply to: 0 the
  previous frame, 1 the reference frame, 2 a frame of zeros (these pad stacks after a reset), 3 none: the whole frame
  is stored;
* the new words of all frames, one after the other, ``uint32``;
* for each change, the number of unchanged words before it, ``uint8``. Where more than 255 words stay the same, an
  unchanged word is written as if it had changed.

All numbers are little-endian. A frame whose size is not a multiple of 4 bytes is padded with zeros.

The reference frame of a lane is renewed when the changes that a newer one would have saved add up to its size.
"""

from __future__ import annotations

import numpy as np

from sb3_extra_buffers.codecs.base import Bytes, Encoded, FrameSpec, Indices, Words
from sb3_extra_buffers.codecs.chains import PREVIOUS, REFERENCE, WHOLE, ZERO, ChainCodec
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State

KIND_SHIFT = 30
"""The two highest bits of a frame's count name the frame that its changes apply to."""
COUNT_MASK = (1 << KIND_SHIFT) - 1

_KERNELS = "sb3_extra_buffers.codecs.delta_words_kernels"


class DeltaWordsCodec(ChainCodec):
    """Changed words, in chains of ``frames_per_record`` frames."""

    name = "delta"
    has_portable_records = False  # the method "delta" creates codecs with another format
    _decode_kernels = _KERNELS

    def __init__(self, frame: FrameSpec, *, frames_per_record: int = 16) -> None:
        super().__init__(frame, frames_per_record)
        # The first frame of each lane's newest record.
        self._previous: Words = np.zeros((0, self._n_words), dtype=np.uint32)

    @property
    def reference_bytes(self) -> int:
        return super().reference_bytes + self._previous.nbytes

    @property
    def min_encoded_size(self) -> int:
        return min(4 * self.frames_per_record, self.record_bytes)

    def encode(self, records: Bytes, lanes: Indices) -> Encoded:
        words = self._as_words(records)
        self._make_room_for_lanes(int(lanes.max()) + 1)
        self._track_changes(words[:, 0], lanes)
        references = self._choose_references(words[:, 0].view(np.uint8), lanes)
        bases = self._frames[references]
        kernels = load_kernels(_KERNELS)
        if kernels is None:
            return Encoded(*encode_numpy(words, bases, self.frame.nbytes), references)
        out = np.empty(len(records) * self.record_bytes, dtype=np.uint8)
        lengths = np.empty(len(records), dtype=np.int64)
        size = kernels.encode(words, bases, self.frame.nbytes, out, lengths)
        return Encoded(out[:size], lengths, references)

    def _decode_by_numpy(self, record: Bytes, reference: Words) -> Bytes:
        return decode_numpy(record, reference, self.frames_per_record, self.frame.nbytes)

    def state(self) -> State:
        return {**super().state(), "previous": self._previous}

    def restore(self, state: SavedState) -> None:
        super().restore(state)
        self._previous = state.array("previous", np.uint32, (len(self._current), self._n_words))

    def _as_words(self, records: Bytes) -> Words:
        frames = records.reshape(len(records), self.frames_per_record, self.frame.nbytes)
        missing = 4 * self._n_words - self.frame.nbytes
        if missing:
            frames = np.pad(frames, ((0, 0), (0, 0), (0, missing)))
        return np.ascontiguousarray(frames).view("<u4")

    def _track_changes(self, first_frames: Words, lanes: Indices) -> None:
        """Track how many bytes a newer reference would have saved."""
        current = self._current[lanes]
        changes = np.count_nonzero(first_frames != self._frames[current], axis=1)
        recent_changes = np.count_nonzero(first_frames != self._previous[lanes], axis=1)
        self._previous[lanes] = first_frames
        # Frames of zeros pad stacks after a reset. They are no reason for another reference.
        self._regret[lanes] += np.maximum(5 * (changes - recent_changes), 0) * first_frames.any(axis=1)

    def _make_room_for_lanes(self, n_lanes: int) -> None:
        missing = n_lanes - len(self._current)
        if missing > 0:  # all at once, so that Ctrl-C leaves arrays of equal length
            self._current, self._regret, self._previous = (
                np.pad(self._current, (0, missing)),
                np.pad(self._regret, (0, missing)),
                np.pad(self._previous, ((0, missing), (0, 0))),
            )


def encode_numpy(words: Words, bases: Words, frame_bytes: int) -> tuple[Bytes, Indices]:
    """Encode without numba. Record ``words[i]`` is relative to the reference frame ``bases[i]``. Defines the format."""
    encoded = []
    for record, base in zip(words, bases, strict=True):
        counts, changed, skips = [], [], []
        for frame, previous in zip(record, [base, *record[:-1]], strict=True):
            kind, places = PREVIOUS, _changes(frame, previous)
            if 8 * len(places) > len(frame):
                for other_kind, other in ((REFERENCE, base), (ZERO, np.zeros_like(base))):
                    other_places = _changes(frame, other)
                    if len(other_places) < len(places):
                        kind, places = other_kind, other_places
            if 5 * len(places) >= 4 * len(frame):
                counts.append(WHOLE << KIND_SHIFT)
                changed.append(frame)
            else:
                counts.append(kind << KIND_SHIFT | len(places))
                changed.append(frame[places])
                skips.append((np.diff(places, prepend=-1) - 1).astype(np.uint8))
        sections = [np.array(counts, dtype="<u4"), np.concatenate(changed).astype("<u4"), *skips]
        payload = b"".join(section.tobytes() for section in sections)
        raw = record.astype("<u4").view(np.uint8)[:, :frame_bytes].tobytes()
        encoded.append(payload if len(payload) < len(raw) else raw)
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), np.array([len(payload) for payload in encoded])


def decode_numpy(payload: Bytes, base: Words, n_frames: int, frame_bytes: int) -> Bytes:
    """Decode a record, which must not be raw, to its frames."""
    header = payload[: 4 * n_frames].tobytes()
    if len(header) != 4 * n_frames:
        raise CorruptDataError(f"A delta record of {len(payload)} bytes is too short for {n_frames} frames.")
    kinds, counts = np.divmod(np.frombuffer(header, dtype="<u4").astype(np.int64), 1 << KIND_SHIFT)
    n_changed = int(np.where(kinds == WHOLE, len(base), counts).sum())
    n_skips = int(np.where(kinds == WHOLE, 0, counts).sum())
    if len(payload) != 4 * n_frames + 4 * n_changed + n_skips:
        raise CorruptDataError(f"A delta record of {len(payload)} bytes does not agree with its counts.")
    changed = np.frombuffer(payload[4 * n_frames : 4 * n_frames + 4 * n_changed].tobytes(), dtype="<u4")
    skips = payload[4 * n_frames + 4 * n_changed :].astype(np.int64)
    frames = np.empty((n_frames, len(base)), dtype=np.uint32)
    previous = base
    for frame, kind, count in zip(frames, kinds.tolist(), counts.tolist(), strict=True):
        if kind == WHOLE:
            frame[:], changed = changed[: len(base)], changed[len(base) :]
        else:
            frame[:] = 0 if kind == ZERO else base if kind == REFERENCE else previous
            places = np.cumsum(skips[:count] + 1) - 1
            if count and places[-1] >= len(base):
                raise CorruptDataError("A delta record changes words beyond the end of its frame.")
            frame[places] = changed[:count]
            changed, skips = changed[count:], skips[count:]
        previous = frame
    return frames.astype("<u4").view(np.uint8)[:, :frame_bytes]


def _changes(frame: Words, base: Words) -> Indices:
    """The places of the words to write: those that differ from ``base``, and one in every gap of 256 unchanged ones."""
    places = np.flatnonzero(frame != base)
    steps = zip([-1, *places[:-1].tolist()], places.tolist(), strict=len(places) > 0)
    fillers = [np.arange(last + 256, place, 256) for last, place in steps if place - last > 256]
    return np.sort(np.concatenate([places, *fillers]))
