"""``dones`` and ``timeouts`` of replay buffers in one byte per transition, where SB3 has two arrays of float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.state import SavedState
from sb3_extra_buffers.storage.usage import MemoryUsage

Flags = npt.NDArray[np.uint8]
"""1 if the episode ended with the transition, 3 if it ended because of a time limit."""
_BITS = {"dones": 0, "timeouts": 1}
DONE_OR_NOT = np.array([0, 1, 0, 0], dtype=np.float32)
"""``dones`` of a batch, for each value of a flag. SB3 does not count a time limit as done."""
_BOOL = np.dtype(np.bool_)
_ONE = np.float32(1).view(np.uint32)
_PIECE = 1 << 14


class _FlagField:
    """``dones`` or ``timeouts``. Reading it unpacks the flags for good, because the caller may change the array."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, buffer: BufferWithFlags | None, owner: type | None = None) -> Any:
        if buffer is None:
            return self
        buffer._unpack_flags()
        try:
            return vars(buffer)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, buffer: BufferWithFlags, array: npt.NDArray[Any]) -> None:
        buffer._unpack_flags()
        vars(buffer)[self._name] = array


class BufferWithFlags(BaseCompressedBuffer, ReplayBuffer):
    """A replay buffer with flags until ``dones`` or ``timeouts`` is read, or one of them is neither 0 nor 1."""

    dones = _FlagField()
    timeouts = _FlagField()
    _flags: Flags | None = None
    _rebuilt: ClassVar[tuple[str, ...]] = ("_flags",)

    def _create_state(self) -> None:
        super()._create_state()
        if self._can_pack_flags():
            del vars(self)["dones"], vars(self)["timeouts"]
            self._flags = np.zeros((self.buffer_size, self.n_envs), dtype=np.uint8)

    def _restore(self, state: SavedState) -> None:
        super()._restore(state)
        if self._can_pack_flags():
            self._pack_flags()

    def _can_pack_flags(self) -> bool:
        """Not if the arrays are in files, or a derived class stores them in another way."""
        return self._folder is None and isinstance(type(self).dones, _FlagField)

    def _pack_flags(self) -> None:
        """Replace arrays by flags, unless a value is neither 0 nor 1."""
        dones, timeouts = self.dones, self.timeouts
        packed = np.zeros((self.buffer_size, self.n_envs), dtype=np.uint8)
        for start in range(0, self.buffer_size, _PIECE):
            piece = slice(start, start + _PIECE)
            flags = flags_of(dones[piece], timeouts[piece])
            if flags is None:
                return
            packed[piece] = flags
        self._flags = packed
        del vars(self)["dones"], vars(self)["timeouts"]

    def _unpack_flags(self) -> None:
        """Replace the flags by arrays."""
        if self._flags is not None:
            with self._lock.held:
                if self._flags is not None:  # no other thread was faster
                    vars(self).update({name: unpacked(self._flags, name) for name in _BITS})
                    self._flags = None

    def _flags_or_arrays(self, done: npt.NDArray[Any], timeouts: npt.NDArray[Any] | None) -> Any:
        """The dones and timeouts of a step as flags, or both arrays if they cannot be packed."""
        if self._flags is not None:
            if timeouts is None and done.dtype is _BOOL:
                return done
            flags = flags_of(done, 0.0 if timeouts is None else timeouts)
            if flags is not None:
                return flags
            self._unpack_flags()
        return done, 0.0 if timeouts is None else timeouts

    def _field_rows(self, name: str, slots: Indices | None = None) -> npt.NDArray[Any]:
        if self._flags is None or name not in _BITS:
            return super()._field_rows(name, slots)
        return unpacked(self._flags if slots is None else self._flags[slots], name)

    def _place_rows(self, slots: Indices, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        if self._flags is not None:
            flags = flags_of(rows["dones"], rows["timeouts"])
            if flags is not None:
                self._flags[slots] = flags
                rows = {name: row for name, row in rows.items() if name not in _BITS}
        super()._place_rows(slots, rows)

    def memory_usage(self) -> MemoryUsage:
        usage = super().memory_usage()
        if self._flags is None:
            return usage
        # SB3 has 8 bytes where this has one.
        saved = 7 * round(self.size() / self.buffer_size * self._flags.nbytes)
        return replace(usage, raw_equivalent=usage.raw_equivalent + saved)

    def _dones_at(self, places: Indices) -> npt.NDArray[np.float32]:
        """``dones`` of a batch, (n, 1): 1 for transitions that end an episode, except by a time limit."""
        if self._flags is not None:
            return DONE_OR_NOT.take(self._flags.reshape(-1, 1).take(places, axis=0))
        found: npt.NDArray[np.float32] = self.dones.reshape(-1, 1).take(places, axis=0)
        found *= 1 - self.timeouts.reshape(-1, 1).take(places, axis=0)
        return found

    def _has_ended(self, places: Any) -> npt.NDArray[np.bool_]:
        """Whether an episode ended at ``(slots, environments)``, also by a time limit."""
        ended: npt.NDArray[np.bool_]
        ended = (self.dones[places] + self.timeouts[places] if self._flags is None else self._flags[places]) > 0
        return ended


def unpacked(flags: Flags, name: str) -> npt.NDArray[np.float32]:
    """``dones`` or ``timeouts`` of some flags."""
    return (flags >> _BITS[name] & 1).astype(np.float32)


def flags_of(dones: npt.ArrayLike, timeouts: npt.ArrayLike) -> Flags | None:
    """``dones`` and ``timeouts`` in one array of bytes, or ``None`` if a value is neither 0 nor 1."""
    flags: Any = 0
    for name, values in (("dones", dones), ("timeouts", timeouts)):
        is_set = np.asarray(values)
        if is_set.dtype != np.bool_:
            bits = np.asarray(values, dtype=np.float32).view(np.uint32)  # not numbers: -0.0 is not 0.0
            is_set = bits == _ONE
            if (is_set != (bits != 0)).any():
                return None
        flags = flags + (is_set.view(np.uint8) << _BITS[name])
    return flags.astype(np.uint8)  # type: ignore[no-any-return]
