"""``bitpack``: every byte as its difference from a prediction, in as few bits as the differences of a block need.

Made for images full of texture or noise, such as camera images, in which ``delta`` finds little to copy. They become
two to four times smaller, and are sampled about as fast as from SB3's buffer.

A frame is cut into blocks of 32 bytes. One of 16 *predictors* predicts each block: as zeros; as the bytes at some
distance before the block (in a row above or, if the image is stored as planes, in the plane of another colour); or as
the sum of the bytes at two distances, minus those at a third. The smallest of the 32 differences between the block and
its prediction is the block's *offset*. It is subtracted from all of them, and each result takes ``width`` bits, 0 to 8.
All arithmetic is modulo 256. No frame depends on another one.

All numbers are little-endian. :mod:`.packed_frames` defines how frames form a record. A frame consists of

* for each block a ``uint16``: predictor (bits 0 to 3), width (4 to 7) and offset (8 to 15);
* for each block its differences, ``4 * width`` bytes: four integers of ``8 * width`` bits, each of which packs eight
  differences, the first one in the lowest bits;
* the bytes after the last whole block, as they are.
"""

from __future__ import annotations

import numpy as np

from sb3_extra_buffers.codecs.base import Bytes, FrameSpec, Indices
from sb3_extra_buffers.codecs.packed_frames import PackedFramesCodec
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State

BLOCK_BYTES = 32
N_PREDICTORS = 16


class BitpackCodec(PackedFramesCodec):
    """Differences from a prediction, packed into few bits."""

    name = "bitpack"
    record_format = "bitpack"
    padding = 8

    def __init__(
        self, frame: FrameSpec, *, frames_per_record: int = PackedFramesCodec.default_frames_per_record
    ) -> None:
        super().__init__(frame, frames_per_record)
        self.predictors = default_predictors(frame)

    @property
    def _min_frame_bytes(self) -> int:
        n_blocks, tail = divmod(self.frame.nbytes, BLOCK_BYTES)
        return 2 * n_blocks + tail

    @property
    def _max_frame_bytes(self) -> int:
        return self.frame.nbytes + 2 * (self.frame.nbytes // BLOCK_BYTES)

    def _pack_frame(self, frame: Bytes) -> bytes:
        return pack_numpy(frame, self.predictors)

    def _unpack_frame(self, body: Bytes) -> Bytes:
        return unpack_numpy(body, self.frame.nbytes, self.predictors)

    def shared_state(self) -> State:
        return self.state()

    def accepts(self, state: SavedState) -> bool:
        return np.array_equal(_read_predictors(state), self.predictors)

    def state(self) -> State:
        return {"predictors": self.predictors}

    def restore(self, state: SavedState) -> None:
        self.predictors = _read_predictors(state)


def default_predictors(frame: FrameSpec) -> Indices:
    """Return four numbers per predictor: the largest of its three distances, then the distances, where 0 means none.

    The first predictor predicts zeros. If the image has planes, the next two use the plane before: the byte at the same
    place in it, and the row above plus the change from that row in the plane before. The others are the rows above,
    beginning with the nearest one that is at least a block away.
    """
    row = frame.row_bytes or BLOCK_BYTES
    plane = frame.nbytes // frame.channels if frame.channels > 1 and not frame.channels_last else 0
    places = [(plane, 0, 0), (row, plane, row + plane)] if plane else []
    rows = range(-(-BLOCK_BYTES // row) * row, BLOCK_BYTES + N_PREDICTORS * row, row)  # nearer ones overlap the block
    places += [(distance, 0, 0) for distance in rows[:8]]
    usable = [place for place in places if all(distance == 0 or distance >= BLOCK_BYTES for distance in place)]
    predictors = np.zeros((N_PREDICTORS, 4), dtype=np.int64)
    predictors[1 : 1 + len(usable), 1:] = usable
    predictors[:, 0] = predictors.max(axis=1)
    return predictors


def _read_predictors(state: SavedState) -> Indices:
    predictors = state.array("predictors", np.int64, (N_PREDICTORS, 4))
    places = predictors[:, 1:]
    right = (places == 0) | (places >= BLOCK_BYTES)
    if predictors[0].any() or not right.all() or (predictors[:, 0] != places.max(axis=1)).any():
        raise state.error("predictors", f"are {predictors.tolist()}")
    return predictors


def pack_numpy(frame: Bytes, predictors: Indices) -> bytes:
    """Encode a frame to the same bytes as the compiled form does."""
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
        # Differences from a prediction are near zero, so they are compared as signed numbers.
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
    """Return for each byte the one at a distance before it; zeros where there is none, and for the distance 0."""
    moved = np.zeros_like(blocks)
    if distance:
        moved[distance:] = blocks[:-distance]
    return moved


def unpack_numpy(body: Bytes, size: int, predictors: Indices) -> Bytes:
    """Decode a frame of ``size`` bytes. This function defines the format."""
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
