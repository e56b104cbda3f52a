"""What both record formats of ``delta`` share: a record is a chain of frames that begins at a reference frame.

Every lane has a current reference frame. A record keeps the one that it was encoded with: reference frames are
reference-counted.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from sb3_extra_buffers.anonymous_memory import AnonymousMemory
from sb3_extra_buffers.codecs.base import Bytes, Codec, FrameSpec, Indices, Words, checked_frames_per_record, payloads
from sb3_extra_buffers.codecs.references import UseCounts
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import SavedState, State

PREVIOUS, REFERENCE, ZERO, WHOLE = range(4)
"""The base of a frame in a chain: the previous frame, the reference frame, zeros, or none (it is stored whole)."""


class ChainCodec(Codec):
    """Chains of ``frames_per_record`` frames, and the reference frames that they begin at.

    :param padding: Bytes after each reference frame, so that kernels may read whole vectors.
    """

    _memory: AnonymousMemory | None = None
    """The memory of the reference frames, once one has been added to those of the constructor or a file."""
    _worth_a_reference = 1
    """A reference frame is renewed when a newer one would have saved this many times its size."""

    def __init__(self, frame: FrameSpec, frames_per_record: int, padding: int = 0) -> None:
        super().__init__(frame)
        self.frames_per_record = checked_frames_per_record(frames_per_record)
        self._n_words = -(-(frame.nbytes + padding) // 4)
        self._uses = UseCounts()
        self._frames: Words = np.zeros((1, self._n_words), dtype=np.uint32)
        # Per lane: the number of its reference frame, and how many bytes a newer one would have saved so far.
        self._current = np.zeros(0, dtype=np.int64)
        self._regret = np.zeros(0, dtype=np.int64)

    @property
    def reference_frames(self) -> Words:
        return self._frames

    @property
    def reference_bytes(self) -> int:
        return self._frames.nbytes

    def decode(self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes) -> None:
        shape = (self.frames_per_record, self.frame.nbytes)
        kernels = load_kernels(self._decode_kernels)
        if kernels is not None:
            frames = out.reshape(-1, *shape)
            done = kernels.decode(data, starts, lengths, references, frames, self._frames, *self._kernel_arguments)
            if done < len(starts):
                raise CorruptDataError(f"The delta record at byte {starts[done]} does not decode.")
            return
        stored = payloads(data, starts, lengths)
        for row, (start, payload), reference in zip(out, stored, references.tolist(), strict=True):
            if not 0 <= reference < len(self._frames):
                raise CorruptDataError(f"The record at byte {start} has no reference frame.")
            record = np.asarray(payload)
            if len(record) != self.record_bytes:
                record = self._decode_by_numpy(record, self._frames[reference]).reshape(-1)
            row[:] = record

    _decode_kernels: str
    """The name of the module with the kernel ``decode``."""

    @property
    def _kernel_arguments(self) -> tuple[Any, ...]:
        """Additional arguments of the kernel ``decode``."""
        return ()

    @abstractmethod
    def _decode_by_numpy(self, record: Bytes, reference: Words) -> Bytes:
        """Decode one record, which was encoded with ``reference``, to its frames."""

    def release(self, references: Indices) -> None:
        self._forget(self._uses.decref(references))

    def _forget(self, references: Indices) -> None:
        """Called when no record and no lane uses these reference frames any more."""

    def count_uses(self, references: Indices) -> bool:
        used = np.concatenate([references, self._current])
        if len(used) and (used.min() < 0 or used.max() >= len(self._frames)):
            return False
        self._uses.restart(len(self._frames))
        self._uses.incref(used)
        return True

    def check(self, references: Indices) -> None:
        self._uses.check(np.concatenate([references, self._current]))
        if len(self._uses) > len(self._frames):
            raise CorruptDataError(f"{len(self._uses)} references are in use, but only {len(self._frames)} exist.")

    def state(self) -> State:
        return {"frames": self._frames, "current": self._current, "regret": self._regret}

    def restore(self, state: SavedState) -> None:
        self._frames = state.array("frames", np.uint32, (None, self._n_words))
        self._current = state.array("current", np.int64, (None,))
        self._regret = state.array("regret", np.int64, (len(self._current),))
        if not len(self._frames) or not self.count_uses(np.zeros(0, dtype=np.int64)):
            raise state.error("current", "names reference frames that do not exist")

    def _make_room_for_lanes(self, n_lanes: int) -> None:
        missing = n_lanes - len(self._current)
        if missing > 0:
            self._current, self._regret = np.pad(self._current, (0, missing)), np.pad(self._regret, (0, missing))

    def _choose_references(self, first_frames: Bytes, lanes: Indices) -> Indices:
        """Return the reference of each record, given its first frame and its lane, and increase its count.

        Where a newer reference would have saved enough, the first frame becomes the lane's reference.
        """
        for row in np.flatnonzero(self._regret[lanes] > self._worth_a_reference * self.frame.nbytes).tolist():
            # Frames of zeros pad stacks after a reset. They would be poor references.
            if first_frames[row].any():
                self._renew_reference(int(lanes[row]), first_frames[row])
        references = self._current[lanes]
        self._uses.incref(references)
        return references

    def reference_content(self, reference: int) -> Bytes:
        content: Bytes = self._frames[reference].view(np.uint8)[: self.frame.nbytes]
        return content

    def import_reference(self, content: Bytes) -> int:
        if len(content) != self.frame.nbytes:
            raise CorruptDataError(f"A reference frame has {len(content)} bytes instead of {self.frame.nbytes}.")
        return self._new_reference(content)

    def incref(self, references: Indices) -> None:
        self._uses.incref(references)

    def _renew_reference(self, lane: int, frame: Bytes) -> None:
        number = self._new_reference(frame)
        replaced, self._current[lane] = self._current[[lane]], number
        self._forget(self._uses.decref(replaced))
        self._regret[lane] = 0

    def _new_reference(self, frame: Bytes) -> int:
        """Add a reference frame, and return its number. Its reference count is 1."""
        number = self._uses.new()
        if number >= len(self._frames):
            self._make_room()
        self._frames[number].view(np.uint8)[: len(frame)] = frame
        return number

    def _make_room(self) -> None:
        """Make room for more reference frames.

        The memory comes from the operating system: frames that move to a larger place would leave a hole in the heap.
        """
        memory, n_frames = self._memory, len(self._frames)
        size = (n_frames + 4 + n_frames // 16) * 4 * self._n_words
        with uninterrupted():
            if memory is not None and self._frames.ctypes.data == memory.data.ctypes.data:
                self._frames = np.zeros((0, self._n_words), dtype=np.uint32)  # arrays of the memory would force a copy
                try:
                    memory.resize(size)
                finally:
                    self._frames = memory.data.view(np.uint32).reshape(-1, self._n_words)
            else:  # those of the constructor or of a file
                memory = AnonymousMemory(size)
                frames = memory.data.view(np.uint32).reshape(-1, self._n_words)
                frames[:n_frames] = self._frames
                self._memory, self._frames = memory, frames
