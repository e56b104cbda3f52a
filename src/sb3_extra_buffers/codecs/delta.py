"""``delta``: the steps that turn each frame into the next one.

A record is a chain of frames. Each frame is made from the previous one, and the first from the lane's *reference
frame*, by *steps* that go through it from its first byte to its last. A step skips some bytes, which stay the same, or
copies some from a place nearby. Then it writes *literals*: new bytes, which the record contains. All numbers are
little-endian.

A record begins with a header for each frame: a ``uint16``, or a ``uint32`` for frames of 16 KiB and more. The two
lowest bits of a header name the *base*, which is the frame that the steps change: 0 the previous frame (for the first
frame: the reference frame), 1 the reference frame, 2 a frame of zeros (these pad stacks after a reset), 3 none: the
whole frame is stored instead of steps. The other bits are the number of bytes that the frame takes. After the headers
come the frames, one after the other: all literals, then all steps, the last one first. So a decoder reads literals from
the front and steps from the back until the two meet. A step is a ``uint16``:

* Bit 0 is 0, *skip*: the next 0 to 511 bytes stay the same (bits 1 to 9), 0 to 63 literals follow (bits 10 to 15).
* Bit 0 is 1, *match*: the next bytes are copied from one of 32 sources (bits 1 to 5), and 0 to 31 literals follow (bits
  11 to 15). Source 0 is the same place in the reference frame. The others are earlier places in this frame; the
  codec's ``distances`` say how many bytes earlier. The number of copied bytes is 3 plus bits 6 to 10. If these bits
  are 31, the value of a byte before the literals of this step is added.

Bytes after the last step stay the same.

The reference frame of a lane is renewed when the bytes that a newer one would have saved add up to its size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from sb3_extra_buffers.codecs.base import Bytes, Codec, Encoded, FrameSpec, Indices, RecordFormat, Words
from sb3_extra_buffers.codecs.chains import PREVIOUS, REFERENCE, WHOLE, ZERO, ChainCodec
from sb3_extra_buffers.codecs.delta_words import DeltaWordsCodec
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State

N_SOURCES = 32
"""Places from which a match can be copied: the reference frame, and 31 distances in the same frame."""
N_FOUND = N_SOURCES + 5
"""Numbers in the statistics of the encoder: one for each source, and five more."""
LONGEST_SKIP, SKIP_LITERALS = 511, 63
"""The most bytes that a step skips, and the most literals after a skip."""
MATCH_BYTES, LONG_MATCH, MATCH_LITERALS = 3, 31, 31
"""What is added to the length in a match, the length that announces one more byte, the most literals after a match."""
LONGEST_MATCH = MATCH_BYTES + LONG_MATCH + 255

_SHORTEST_SKIP = 3
"""The fewest bytes between two changes that the NumPy encoder skips."""
_PADDING = 64
"""Bytes after each reference frame, so that kernels may read whole vectors."""
_ENCODE_KERNELS = "sb3_extra_buffers.codecs.delta_encode_kernels"


class DeltaCodec(ChainCodec):
    """Steps from frame to frame, in chains of ``frames_per_record`` frames (8 by default)."""

    name = "delta"
    record_format: ClassVar[RecordFormat | None] = "delta"
    default_frames_per_record = 8
    _decode_kernels = "sb3_extra_buffers.codecs.delta_kernels"

    def __init__(self, frame: FrameSpec, *, frames_per_record: int | None = None) -> None:
        default = self.default_frames_per_record
        super().__init__(frame, default if frames_per_record is None else frames_per_record, _PADDING)
        self._given = {} if frames_per_record is None else {"frames_per_record": frames_per_record}
        self.distances = default_distances(frame)
        # Statistics of recent records, with which the encoder searches less: the bytes saved by matches of each source;
        # the number of records; for frames based on the reference, the bytes that they took and the number of bytes in
        # which they differed from it; and the same two numbers for frames based on the previous frame.
        self._found = np.zeros(N_FOUND, dtype=np.int64)

    @property
    def min_encoded_size(self) -> int:
        return min(header_bytes(self.frame.nbytes) * self.frames_per_record, self.record_bytes)

    def encode(self, records: Bytes, lanes: Indices) -> Encoded:
        self._make_room_for_lanes(int(lanes.max()) + 1)
        references = self._choose_references(records[:, : self.frame.nbytes], lanes)
        kernels = load_kernels(_ENCODE_KERNELS)
        if kernels is None:
            data, lengths, excess = encode_numpy(records, self._frames[references], self.frames_per_record)
        else:
            if self.frame.nbytes < _PADDING:  # a vector reaches beyond the end even from frames before the last one
                records = np.append(records, np.zeros(_PADDING, dtype=np.uint8))[: records.size].reshape(records.shape)
            room = 2 * self.frame.nbytes + 4 * self.frames_per_record + 4 * _PADDING
            out = np.empty(records.size + room, dtype=np.uint8)
            lengths, excess = np.empty((2, len(records)), dtype=np.int64)
            size = kernels.encode(
                records, references, self._frames, self.frames_per_record, self.distances, self._found, out, lengths,
                excess,
            )  # fmt: skip
            data = out[:size]
        self._regret[lanes] += excess
        return Encoded(data, lengths, references)

    @property
    def _kernel_arguments(self) -> tuple[Any, ...]:
        return (self.distances,)

    def _decode_by_numpy(self, record: Bytes, reference: Words) -> Bytes:
        base = reference.view(np.uint8)[: self.frame.nbytes]
        return decode_numpy(record, base, self.frames_per_record, self.distances)

    def shared_state(self) -> State:
        return {"distances": self.distances}

    def accepts(self, state: SavedState) -> bool:
        return bool((state.array("distances", np.int64, (N_SOURCES,)) == self.distances).all())

    def state(self) -> State:
        return {**super().state(), "distances": self.distances}

    def restored(self, state: SavedState) -> Codec:
        if state.has("distances"):
            return super().restored(state)
        # Written by 1.0.0.dev0 or by a buffer on a GPU.
        return DeltaWordsCodec(self.frame, **self._given).restored(state)

    def restore(self, state: SavedState) -> None:
        super().restore(state)
        self.distances = state.array("distances", np.int64, (N_SOURCES,))
        if self.distances[0] != 0 or (self.distances[1:] < 1).any():
            raise state.error("distances", f"are {self.distances.tolist()}")

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """Accept pickles of 1.0.0.dev0, which name this class, but whose records are those of ``DeltaWordsCodec``."""
        vars(self).update(attributes)
        if "distances" not in attributes:
            self.__class__ = DeltaWordsCodec  # type: ignore[assignment]


def header_bytes(frame_bytes: int) -> int:
    """The size of a frame's header in bytes."""
    return 2 if frame_bytes < 1 << 14 else 4


def default_distances(frame: FrameSpec) -> Indices:
    """Return how many bytes before its target each source lies: in the same row of an image, or in a row above."""
    pixel = frame.dtype.itemsize * (frame.channels if frame.channels_last else 1)
    row = frame.row_bytes
    distances = [pixel * i for i in range(1, 9)]
    if row:
        distances += [row + pixel * i for i in range(-5, 6)] + [row * i for i in range(2, 9)]
        distances += [2 * row - pixel, 2 * row + pixel]
    distances += [pixel * i for i in (9, 12, 16, *range(10, 2 * N_SOURCES))]
    different = dict.fromkeys(distance for distance in distances if distance > 0)
    return np.array([0, *different][:N_SOURCES], dtype=np.int64)


def encode_numpy(records: Bytes, bases: Words, group: int) -> tuple[Bytes, Indices, Indices]:
    """Encode without numba. It searches no matches, so records are larger than those of the compiled form.

    Returns the bytes of all records, their lengths, and for each record how many bytes more its first frame took than
    the mean of the others.
    """
    encoded, excess = [], []
    size = records.shape[1] // group
    for record, base in zip(records.reshape(len(records), group, size), bases, strict=True):
        reference = base.view(np.uint8)[:size]
        headers, bodies = [], []
        for frame, previous in zip(record, [reference, *record[:-1]], strict=True):
            kind, body = PREVIOUS, _steps(frame, previous)
            if 8 * len(body) > size:
                for other_kind, other in ((REFERENCE, reference), (ZERO, np.zeros_like(reference))):
                    other_body = _steps(frame, other)
                    if len(other_body) < len(body):
                        kind, body = other_kind, other_body
            if len(body) >= size:
                kind, body = WHOLE, frame.tobytes()
            headers.append(kind | len(body) << 2)
            bodies.append(body)
        payload = np.array(headers, dtype=f"<u{header_bytes(size)}").tobytes() + b"".join(bodies)
        sizes = [len(body) for body in bodies]
        excess.append(max(0, sizes[0] - (sum(sizes[1:]) // (group - 1) if group > 1 else sizes[0] // 2)))
        encoded.append(payload if len(payload) < record.size else record.tobytes())
    lengths = np.array([len(payload) for payload in encoded], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), lengths, np.array(excess, dtype=np.int64)


def _steps(frame: Bytes, base: Bytes) -> bytes:
    """Encode the skips and literals that turn ``base`` into ``frame``."""
    changed = np.flatnonzero(frame != base)
    if len(changed) == 0:
        return b""
    # Skipping a byte or two costs as much as writing them.
    breaks = np.flatnonzero(np.diff(changed) > _SHORTEST_SKIP)
    starts, ends = changed[np.append(0, breaks + 1)].tolist(), (changed[np.append(breaks, -1)] + 1).tolist()
    literals, steps, position = [], [], 0
    for start, end in zip(starts, ends, strict=True):
        skip = start - position
        while skip > LONGEST_SKIP:
            steps.append(LONGEST_SKIP << 1)
            skip -= LONGEST_SKIP
        for first in range(start, end, SKIP_LITERALS):
            some = min(SKIP_LITERALS, end - first)
            steps.append(skip << 1 | some << 10)
            skip = 0
        literals.append(frame[start:end].tobytes())
        position = end
    return b"".join(literals) + np.array(steps[::-1], dtype="<u2").tobytes()


def decode_numpy(payload: Bytes, base: Bytes, n_frames: int, distances: Indices) -> Bytes:
    """Decode a record, which must not be raw, to its frames. This function defines the format."""
    size, data, width = len(base), payload.tobytes(), header_bytes(len(base))
    headers = [int.from_bytes(data[width * i : width * (i + 1)], "little") for i in range(n_frames)]
    if len(data) < width * n_frames or len(data) != width * n_frames + sum(header >> 2 for header in headers):
        raise CorruptDataError(f"A delta record of {len(data)} bytes does not agree with its headers.")
    frames, at, reference, previous = np.empty((n_frames, size), dtype=np.uint8), width * n_frames, bytes(base), base
    for out, header in zip(frames, headers, strict=True):
        kind, body = header & 3, data[at : at + (header >> 2)]
        at += len(body)
        if kind == WHOLE:
            if len(body) != size:
                raise CorruptDataError(f"A delta record has a frame of {len(body)} bytes instead of {size}.")
            out[:] = np.frombuffer(body, dtype=np.uint8)
        else:
            out[:] = 0 if kind == ZERO else base if kind == REFERENCE else previous
            frame = bytearray(out)
            _follow(body, frame, reference, distances.tolist())
            out[:] = frame
        previous = out
    return frames


def _follow(body: bytes, frame: bytearray, reference: bytes, distances: list[int]) -> None:
    """Apply the steps of one frame."""
    position, at, end = 0, 0, len(body)
    while at < end:
        end -= 2
        step = int.from_bytes(body[max(end, 0) : end + 2], "little")
        if step & 1:
            source, length, n_literals = step >> 1 & 31, step >> 6 & 31, step >> 11
            if length == LONG_MATCH:
                length += body[at]
                at += 1
            length += MATCH_BYTES
            if distances[source] > position or position + length > len(frame):
                raise CorruptDataError("A delta record copies bytes from or to the outside of a frame.")
            for place in range(position, position + length):
                frame[place] = frame[place - distances[source]] if source else reference[place]
            position += length
        else:
            position += step >> 1 & LONGEST_SKIP
            n_literals = step >> 10
        if at + n_literals > end or position + n_literals > len(frame):
            raise CorruptDataError("A delta record has literals beyond the end of a frame.")
        frame[position : position + n_literals] = body[at : at + n_literals]
        position += n_literals
        at += n_literals
    if at != end:
        raise CorruptDataError("A delta record has literals that no step uses.")
