"""``pixel-lz``: each frame as new pixels, and copies of earlier pixels of the same frame.

Made for colour images of tiles, sprites and flat areas, such as those of Crafter and CarRacing. Each frame is decoded
on its own, in about the time that SB3's buffer takes to read the image.

In RGB images of bytes with three planes, a *pixel* is three bytes, one from each plane. In all other frames, it is one
byte. A frame is made by *steps*: each writes 0 to 15 new pixels, called *literals*, and then copies 0 to 31 earlier
pixels. The *distance* says how many pixels before its target the copy begins. A step is a number of 24 bits,
little-endian:

* bits 0 to 3: the number of literals;
* bits 4 to 8: the number of copied pixels. It is at most the distance, unless that is 1;
* bits 9 to 23: the distance, 0 if nothing is copied. If it is 1, the last pixel is repeated.

A frame consists of all literals, then all steps, the last one first. So a decoder reads literals from the front and
steps from the back until the two meet. Of the literals of an RGB step, the red values come first, then the green ones,
then the blue ones. :mod:`.packed_frames` defines how frames form a record.
"""

from __future__ import annotations

import numpy as np

from sb3_extra_buffers.codecs.base import Bytes, FrameSpec
from sb3_extra_buffers.codecs.packed_frames import PackedFramesCodec
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State

MOST_LITERALS, LONGEST_COPY, LONGEST_DISTANCE = 15, 31, (1 << 15) - 1
"""What fits into the bits of one step, in pixels."""
STEP_BYTES = 3
_RGB = 3


class PixelLzCodec(PackedFramesCodec):
    """Copies of earlier pixels of the same frame, and new pixels."""

    name = "pixel-lz"
    record_format = "pixel-lz"
    padding = 16

    def __init__(
        self, frame: FrameSpec, *, frames_per_record: int = PackedFramesCodec.default_frames_per_record
    ) -> None:
        super().__init__(frame, frames_per_record)
        is_rgb = frame.channels == _RGB and not frame.channels_last and frame.dtype.itemsize == 1
        self.planes = _RGB if is_rgb else 1

    def shared_state(self) -> State:
        return self.state()

    def accepts(self, state: SavedState) -> bool:
        return self._read_planes(state) == self.planes

    def state(self) -> State:
        return {"planes": self.planes}

    def restore(self, state: SavedState) -> None:
        self.planes = self._read_planes(state)

    def _read_planes(self, state: SavedState) -> int:
        planes = state.integer("planes", 1, _RGB)
        if planes not in (1, _RGB) or self.frame.nbytes % planes:
            raise state.error("planes", f"are {planes} of a frame of {self.frame.nbytes} bytes")
        return planes

    @property
    def _min_frame_bytes(self) -> int:
        pixels = self.frame.nbytes // self.planes
        return STEP_BYTES * -(-pixels // (MOST_LITERALS + LONGEST_COPY))

    @property
    def _max_frame_bytes(self) -> int:
        n_steps = self.frame.nbytes // self.planes // MOST_LITERALS + 1
        return self.frame.nbytes + STEP_BYTES * n_steps

    def _pack_frame(self, frame: Bytes) -> bytes:
        """Encode a frame without numba. Only copies of the previous pixel are found, so frames become larger."""
        pixels = frame.reshape(self.planes, -1)
        is_new = np.append(True, (pixels[:, 1:] != pixels[:, :-1]).any(axis=0))
        begins = np.flatnonzero(is_new)
        # A run of equal pixels is one literal and copies of it. Successive new pixels are the literals of one step.
        literals, steps, waiting = [], [], 0
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(is_new)], strict=True):
            waiting += 1
            n_copies = end - begin - 1
            if not n_copies and waiting < MOST_LITERALS and end < len(is_new):
                continue
            literals.append(pixels[:, begin + 1 - waiting : begin + 1].tobytes())
            while waiting or n_copies:
                some = min(n_copies, LONGEST_COPY)
                steps.append((waiting | some << 4 | (some > 0) << 9).to_bytes(STEP_BYTES, "little"))
                waiting, n_copies = 0, n_copies - some
        return b"".join(literals + steps[::-1])

    def _unpack_frame(self, body: Bytes) -> Bytes:
        pixels = np.zeros((self.planes, self.frame.nbytes // self.planes), dtype=np.uint8)
        position, at, end = 0, 0, len(body)
        while at < end:
            end -= STEP_BYTES
            step = int.from_bytes(body[max(end, 0) : end + STEP_BYTES].tobytes(), "little")
            n_literals, n_copied, distance = step & 15, step >> 4 & 31, step >> 9
            size, target = self.planes * n_literals, position + n_literals
            if at + size > end or target + n_copied > pixels.shape[1] or distance > target:
                raise CorruptDataError("A pixel-lz step goes beyond the pixels or the bytes of its frame.")
            if n_copied > distance != 1:
                raise CorruptDataError(f"A pixel-lz step copies {n_copied} pixels from {distance} before.")
            pixels[:, position:target] = body[at : at + size].reshape(self.planes, n_literals)
            source = target - distance
            pixels[:, target : target + n_copied] = pixels[:, source : source + min(n_copied, distance)]
            position, at = target + n_copied, at + size
        if at != end or position != pixels.shape[1]:
            raise CorruptDataError(f"The steps of a pixel-lz frame make {position} of {pixels.shape[1]} pixels.")
        return pixels.reshape(-1)
