"""``none``: records without compression."""

from __future__ import annotations

import numpy as np

from sb3_extra_buffers.codecs.base import NO_REFERENCE, Bytes, Codec, Encoded, FrameSpec, Indices
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State

_RECORD_BYTES, _MOST_FRAMES = 1 << 14, 64
"""A record contains as many frames as fit into this many bytes, but at most this many frames."""
_LARGE_RECORD_BYTES, _LARGE_FRAMES = 1 << 17, 8
"""These are the limits for larger frames, of which fewer than 8 would fit into ``_RECORD_BYTES``."""


class NoneCodec(Codec):
    """No compression. The store still shares frames, which saves most of the memory."""

    name = "none"
    record_format = "raw"

    def __init__(self, frame: FrameSpec) -> None:
        super().__init__(frame)
        # Several frames make a record, so that the index and the work per record stay small.
        self._frames_in_dev0 = max(1, min(_MOST_FRAMES, _RECORD_BYTES // frame.nbytes))
        """The frames per record of version 1.0.0.dev0, whose files do not contain this number."""
        self._usual_frames = max(self._frames_in_dev0, min(_LARGE_FRAMES, _LARGE_RECORD_BYTES // frame.nbytes))
        self.frames_per_record = self._usual_frames

    @property
    def min_encoded_size(self) -> int:
        return self.record_bytes

    def encode(self, records: Bytes, lanes: Indices) -> Encoded:
        n = len(records)
        return Encoded(records.reshape(-1).copy(), np.full(n, self.record_bytes), np.full(n, NO_REFERENCE))

    def decode(self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes) -> None:
        size = self.record_bytes
        if (lengths != size).any() or (starts < 0).any() or (starts > len(data) - size).any():
            raise CorruptDataError(f"A raw record does not have {size} bytes inside the store.")
        if len(starts):
            out[:] = np.lib.stride_tricks.sliding_window_view(data, size)[starts]

    def state(self) -> State:
        return {"frames_per_record": self.frames_per_record}

    def restore(self, state: SavedState) -> None:
        has_number = state.has("frames_per_record")
        number = state.integer("frames_per_record", 1, _MOST_FRAMES) if has_number else self._frames_in_dev0
        self.frames_per_record, self.has_portable_records = number, number == self._usual_frames
