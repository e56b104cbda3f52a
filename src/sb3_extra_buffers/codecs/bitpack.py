"""``bitpack``: every byte as its difference to a prediction, in as few bits as the differences of a block need.

Made for images full of texture or noise, such as those of cameras, in which ``delta`` finds little to copy. They become
two to four times smaller, and are sampled about as fast as from SB3's buffer.

A frame is cut into blocks of 32 bytes. Each block is predicted by one of 16 *predictors*: by nothing (zeros), by the
bytes some distance before it (in a row above or, where images are stored as planes, in that of another colour), or by
two such places minus a third. The smallest difference is the block's *offset*. By how much each of the 32 differences
is larger takes ``width`` bits, 0 to 8. All of this is arithmetic modulo 256. No frame needs another one.

All numbers are little-endian. A record is the size of each frame as a ``uint32``, the frames, and 8 bytes of zeros, so
that decoders can read whole words. A frame is

* for each block a ``uint16``: predictor (bits 0 to 3), width (4 to 7) and offset (8 to 15);
* for each block its differences, ``4 * width`` bytes: four integers of ``8 * width`` bits, each of which has eight
  differences, the first one in the lowest bits;
* the bytes after the last whole block, as they are.
"""

from __future__ import annotations

import numpy as np

from sb3_extra_buffers.codecs.base import (
    NO_REFERENCE,
    Bytes,
    Codec,
    Encoded,
    FrameSpec,
    Indices,
    checked_frames_per_record,
)
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State

BLOCK_BYTES = 32
N_PREDICTORS = 16
PADDING = 8
"""Zeros after the last frame of a record."""
_KERNELS = "sb3_extra_buffers.codecs.bitpack_kernels"


class BitpackCodec(Codec):
    """Differences to a prediction, packed into few bits. Every frame can be decoded on its own."""

    name = "bitpack"
    record_format = "bitpack"
    default_frames_per_record = 4

    def __init__(self, frame: FrameSpec, *, frames_per_record: int = default_frames_per_record) -> None:
        super().__init__(frame)
        self.frames_per_record = checked_frames_per_record(frames_per_record)
        self.predictors = default_predictors(frame)

    @property
    def min_encoded_size(self) -> int:
        n_blocks, tail = divmod(self.frame.nbytes, BLOCK_BYTES)
        return min(self.frames_per_record * (4 + 2 * n_blocks + tail) + PADDING, self.record_bytes)

    def encode(self, records: Bytes, lanes: Indices) -> Encoded:
        kernels = load_kernels(_KERNELS)
        frames = records.reshape(-1, self.frames_per_record, self.frame.nbytes)
        if kernels is None:
            data, lengths = encode_numpy(frames, self.predictors)
        else:
            # Before a record is found to be larger than raw, it may have grown by the headers of its blocks.
            room = self.record_bytes // 16 + 4 * self.frames_per_record + 2 * PADDING
            out = np.empty(records.size + room, dtype=np.uint8)
            lengths = np.empty(len(records), dtype=np.int64)
            data = out[: kernels.encode(frames, self.predictors, out, lengths)]
        return Encoded(data, lengths, np.full(len(records), NO_REFERENCE))

    def decode(self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes) -> None:
        kernels = load_kernels(_KERNELS)
        frames = out.reshape(-1, self.frames_per_record, self.frame.nbytes)
        if kernels is not None:
            done = kernels.decode(data, starts, lengths, frames, self.predictors)
            if done < len(starts):
                raise CorruptDataError(f"The bitpack record at byte {starts[done]} does not decode.")
            return
        for row, start, length in zip(frames, starts.tolist(), lengths.tolist(), strict=True):
            payload = data[start : start + length]
            if start < 0 or len(payload) != length:
                raise CorruptDataError(f"The record at byte {start} lies outside the store.")
            row[:] = payload.reshape(row.shape) if length == row.size else decode_numpy(payload, row, self.predictors)

    def shared_state(self) -> State:
        return self.state()

    def accepts(self, state: SavedState) -> bool:
        return np.array_equal(_predictors_in(state), self.predictors)

    def state(self) -> State:
        return {"predictors": self.predictors}

    def restore(self, state: SavedState) -> None:
        self.predictors = _predictors_in(state)


def default_predictors(frame: FrameSpec) -> Indices:
    """For each predictor how far back it reaches, and the distances of its three places; 0 stands for none.

    They are the rows above, from the first that is a block away, the same place in the plane of another colour, and how
    that differs from the row above it.
    """
    row = frame.row_bytes or BLOCK_BYTES
    plane = frame.nbytes // frame.channels if frame.channels > 1 and not frame.channels_last else 0
    places = [(plane, 0, 0), (row, plane, row + plane)] if plane else []
    rows = range(-(-BLOCK_BYTES // row) * row, BLOCK_BYTES + N_PREDICTORS * row, row)  # none within the block itself
    places += [(distance, 0, 0) for distance in rows[:8]]
    usable = [place for place in places if all(distance == 0 or distance >= BLOCK_BYTES for distance in place)]
    predictors = np.zeros((N_PREDICTORS, 4), dtype=np.int64)
    predictors[1 : 1 + len(usable), 1:] = usable
    predictors[:, 0] = predictors.max(axis=1)
    return predictors


def _predictors_in(state: SavedState) -> Indices:
    predictors = state.array("predictors", np.int64, (N_PREDICTORS, 4))
    places = predictors[:, 1:]
    right = (places == 0) | (places >= BLOCK_BYTES)
    if predictors[0].any() or not right.all() or (predictors[:, 0] != places.max(axis=1)).any():
        raise state.error("predictors", f"are {predictors.tolist()}")
    return predictors


def encode_numpy(records: Bytes, predictors: Indices) -> tuple[Bytes, Indices]:
    """Runs without numba, and writes the same bytes. Returns those of all records, and their lengths."""
    encoded = []
    for record in records:
        frames = [_pack(frame, predictors) for frame in record]
        sizes = np.array([len(frame) for frame in frames], dtype="<u4")
        payload = sizes.tobytes() + b"".join(frames) + bytes(PADDING)
        encoded.append(payload if len(payload) < record.size else record.tobytes())
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), np.array([len(record) for record in encoded])


def _pack(frame: Bytes, predictors: Indices) -> bytes:
    n_blocks = len(frame) // BLOCK_BYTES
    blocks = frame[: n_blocks * BLOCK_BYTES]
    starts = np.arange(n_blocks) * BLOCK_BYTES
    widths, headers = np.full(n_blocks, 9), np.zeros(n_blocks, dtype="<u2")
    chosen = np.zeros((n_blocks, BLOCK_BYTES), dtype=np.uint8)
    for number, (reach, *distances) in enumerate(predictors.tolist()):
        if number and not reach:
            continue
        first, second, third = (_moved(blocks, distance) for distance in distances)
        differences = (blocks - first - second + third).reshape(-1, BLOCK_BYTES)
        # Differences to a prediction are around zero, so they are compared as signed numbers.
        bias = np.uint8(128 if number else 0)
        lowest = (differences ^ bias).min(axis=1) ^ bias
        differences -= lowest[:, None]
        needed = np.array([int(largest).bit_length() for largest in differences.max(axis=1)], dtype=np.int64)
        better = (needed < widths) & (starts >= reach)
        widths[better], chosen[better] = needed[better], differences[better]
        headers[better] = number | needed[better] << 4 | lowest[better].astype(np.int64) << 8
    bits = np.unpackbits(chosen[:, :, None], axis=2, bitorder="little")
    packed = [np.packbits(block[:, :width], bitorder="little") for block, width in zip(bits, widths, strict=True)]
    return headers.tobytes() + b"".join(map(bytes, packed)) + frame[len(blocks) :].tobytes()


def _moved(blocks: Bytes, distance: int) -> Bytes:
    """For each byte the one at some distance before it; zeros where there is none, and for the distance 0."""
    moved = np.zeros_like(blocks)
    if distance:
        moved[distance:] = blocks[:-distance]
    return moved


def decode_numpy(payload: Bytes, frames: Bytes, predictors: Indices) -> Bytes:
    """Frames like ``frames`` from a record that is not raw. Defines the format."""
    n_frames, size = frames.shape
    sizes = payload[: 4 * n_frames].tobytes()
    ends = 4 * n_frames + np.cumsum(np.frombuffer(sizes[: len(sizes) // 4 * 4], dtype="<u4"), dtype=np.int64)
    if len(ends) != n_frames or ends[-1] + PADDING != len(payload):
        raise CorruptDataError(f"A bitpack record of {len(payload)} bytes does not agree with its sizes.")
    parts = np.split(payload, ends)
    return np.stack([_unpack(part, size, predictors) for part in (parts[0][4 * n_frames :], *parts[1:-1])])


def _unpack(body: Bytes, size: int, predictors: Indices) -> Bytes:
    n_blocks = size // BLOCK_BYTES
    headers = body[: 2 * n_blocks].tobytes()
    if len(headers) < 2 * n_blocks:
        raise CorruptDataError(f"A bitpack frame of {len(body)} bytes has no room for {n_blocks} blocks.")
    frame, at = np.zeros(size, dtype=np.uint8), 2 * n_blocks
    for start, header in zip(range(0, size, BLOCK_BYTES), np.frombuffer(headers, dtype="<u2").tolist(), strict=False):
        (reach, first, second, third), width, offset = predictors[header & 15].tolist(), header >> 4 & 15, header >> 8
        if width > 8 or reach > start or at + 4 * width > len(body):
            raise CorruptDataError("A bitpack block has too many bits, or refers to the outside of its frame.")
        bits = np.unpackbits(body[at : at + 4 * width], bitorder="little").reshape(BLOCK_BYTES, width)
        block = np.packbits(bits, axis=1, bitorder="little")[:, 0] if width else np.zeros(BLOCK_BYTES, dtype=np.uint8)
        for distance, factor in ((first, 1), (second, 1), (third, -1)):
            if distance:
                block = block + np.uint8(factor % 256) * frame[start - distance :][:BLOCK_BYTES]
        frame[start : start + BLOCK_BYTES] = block + np.uint8(offset)
        at += 4 * width
    if len(body) - at != size - n_blocks * BLOCK_BYTES:
        raise CorruptDataError(f"A bitpack frame has {len(body) - at} bytes after its blocks.")
    frame[n_blocks * BLOCK_BYTES :] = body[at:]
    return frame
