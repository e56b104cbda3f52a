"""Store dones, timeouts and discrete actions of replay buffers in fewer bytes than SB3.

``dones`` and ``timeouts``, two float32 arrays in SB3, share one byte per transition. Discrete actions, int64 in SB3,
take one byte each. If you access such an array, or a value does not fit, the buffer uses SB3's array from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.state import SavedState
from sb3_extra_buffers.storage.usage import MemoryUsage

Flags = npt.NDArray[np.uint8]
"""One byte per transition: 1 if the episode ended with it, 3 if it ended because of a time limit."""
_BITS = {"dones": 0, "timeouts": 1}
"""The bit of each field in a flag, counted from the lowest."""
_PACKED = {"_flags": ("dones", "timeouts"), "_action_bytes": ("actions",)}
"""The attribute of each packed array, and the fields that it contains."""
DONE_OR_NOT = np.array([0, 1, 0, 0], dtype=np.float32)
"""``dones`` of a batch for each flag. Like SB3, it does not count a time limit as done."""
_ONE = np.float32(1).view(np.uint32)
"""The bits of 1.0."""
_PIECE = 1 << 14
"""How many slots are packed at a time, because packing takes temporary memory."""


class _PackedField:
    """An attribute that is SB3's array. Accessing it unpacks the field for good, as the caller may change the array."""

    def __init__(self, packed: str) -> None:
        self._packed = packed

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, buffer: PackedFields | None, owner: type | None = None) -> Any:
        if buffer is None:
            return self
        buffer._unpack(self._packed)
        try:
            return vars(buffer)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, buffer: PackedFields, array: npt.NDArray[Any]) -> None:
        buffer._unpack(self._packed)
        vars(buffer)[self._name] = array


class PackedFields(BaseCompressedBuffer, ReplayBuffer):
    """A replay buffer that packs each field until someone accesses it or a value does not fit."""

    dones = _PackedField("_flags")
    timeouts = _PackedField("_flags")
    actions = _PackedField("_action_bytes")
    _flags: Flags | None = None
    _action_bytes: Bytes | None = None
    """The actions of all transitions, flat."""
    _rebuilt: ClassVar[tuple[str, ...]] = ("_flags", "_action_bytes")

    def _create_state(self) -> None:
        super()._create_state()
        self._action_shape, self._action_dtype = (self.n_envs, self.action_dim), self.actions.dtype
        if self._can_pack("_flags"):
            del vars(self)["dones"], vars(self)["timeouts"]
            self._flags = np.zeros((self.buffer_size, self.n_envs), dtype=np.uint8)
        if self._can_pack("_action_bytes"):
            self._action_bytes = np.zeros(vars(self).pop("actions").size, dtype=np.uint8)

    def _restore(self, state: SavedState) -> None:
        # The fields of this new buffer are zeros. Unpacking them would write to all their memory.
        for packed, names in _PACKED.items():
            if getattr(self, packed) is not None:
                for name in names:
                    like = self._field_rows(name, np.arange(0))
                    vars(self)[name] = np.zeros((self.buffer_size, *like.shape[1:]), like.dtype)
                setattr(self, packed, None)
        super()._restore(state)
        for packed in _PACKED:
            if self._can_pack(packed):
                self._pack(packed)

    def _restore_pickle_of_dev0(self, attributes: dict[str, Any]) -> None:
        super()._restore_pickle_of_dev0(attributes)
        self._action_shape, self._action_dtype = (self.n_envs, self.action_dim), self.actions.dtype

    def _can_pack(self, packed: str) -> bool:
        """Whether to pack: not if the arrays are in files, a derived class replaces them, or actions need more bits."""
        is_ours = self._folder is None and isinstance(getattr(type(self), _PACKED[packed][0]), _PackedField)
        return is_ours and (packed == "_flags" or _fit_into_bytes(self.action_space))

    def _pack(self, packed: str) -> None:
        """Replace SB3's arrays by a packed one, unless a value does not fit."""
        arrays = [getattr(self, name) for name in _PACKED[packed]]
        values = np.zeros(arrays[0].shape, dtype=np.uint8)
        for start in range(0, self.buffer_size, _PIECE):
            piece = slice(start, start + _PIECE)
            part = _PACK[packed](*(array[piece] for array in arrays))
            if part is None:
                return
            values[piece] = part
        setattr(self, packed, values if packed == "_flags" else values.reshape(-1))
        for name in _PACKED[packed]:
            del vars(self)[name]

    def _unpack(self, packed: str) -> None:
        """Replace a packed array by SB3's arrays."""
        if getattr(self, packed) is not None:
            with self._lock.held:
                if getattr(self, packed) is not None:  # no other thread was faster
                    vars(self).update({name: self._field_rows(name) for name in _PACKED[packed]})
                    setattr(self, packed, None)

    def _packed_rows(self, packed: str) -> npt.NDArray[np.uint8]:
        """A packed array with slots as its first axis."""
        rows: npt.NDArray[np.uint8] = getattr(self, packed)
        return rows if packed == "_flags" else rows.reshape(self.buffer_size, *self._action_shape)

    def _flags_or_arrays(self, done: npt.NDArray[Any], timeouts: npt.ArrayLike) -> Any:
        """The dones and timeouts of a step as flags, or both arrays if a value does not fit."""
        if self._flags is not None:
            flags = _flags_of(done, timeouts)
            if flags is not None:
                return flags
            self._unpack("_flags")
        return done, timeouts

    def _bytes_or_array(self, action: npt.NDArray[Any]) -> bytes | npt.NDArray[Any]:
        """The actions of a step as bytes, or the array if a value does not fit."""
        if self._action_bytes is not None:
            try:
                return bytes(action.ravel().tolist())  # several times faster than NumPy for a few numbers
            except ValueError:  # not in range(256)
                self._unpack("_action_bytes")
        return action

    def _field_rows(self, name: str, slots: Indices | None = None) -> npt.NDArray[Any]:
        if name == "actions" and self._action_bytes is not None:
            packed = self._packed_rows("_action_bytes")
            return (packed if slots is None else packed[slots]).astype(self._action_dtype)
        if name in _BITS and self._flags is not None:
            flags = self._flags if slots is None else self._flags[slots]
            return (flags >> _BITS[name] & 1).astype(np.float32)
        return super()._field_rows(name, slots)

    def _place_rows(self, slots: Indices, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        for packed, names in _PACKED.items():
            if getattr(self, packed) is not None and rows.keys() >= set(names):
                values = _PACK[packed](*(rows[name] for name in names))
                if values is not None:
                    self._packed_rows(packed)[slots] = values
                    rows = {name: row for name, row in rows.items() if name not in names}
        super()._place_rows(slots, rows)

    def memory_usage(self) -> MemoryUsage:
        usage, filled, saved = super().memory_usage(), self.size() / self.buffer_size, 0
        if self._flags is not None:
            saved += 7 * round(filled * self._flags.nbytes)  # SB3 uses 8 bytes per transition
        if self._action_bytes is not None:
            saved += (self._action_dtype.itemsize - 1) * round(filled * self._action_bytes.nbytes)
        return replace(usage, raw_equivalent=usage.raw_equivalent + saved)

    def _actions_at(self, places: Indices) -> npt.NDArray[Any]:
        """The actions at ``slot * n_envs + env``, (n, action_dim)."""
        packed = self._action_bytes
        if packed is not None:
            return packed.reshape(-1, self.action_dim).take(places, axis=0).astype(self._action_dtype)
        found: npt.NDArray[Any] = self.__dict__["actions"].reshape(-1, self.action_dim).take(places, axis=0)
        return found

    def _dones_at(self, places: Indices) -> npt.NDArray[np.float32]:
        """The dones at ``slot * n_envs + env``, (n, 1): 1 where an episode ended, except at a time limit."""
        if self._flags is not None:
            return DONE_OR_NOT.take(self._flags.reshape(-1, 1).take(places, axis=0))
        found: npt.NDArray[np.float32] = self.dones.reshape(-1, 1).take(places, axis=0)
        found *= 1 - self.timeouts.reshape(-1, 1).take(places, axis=0)
        return found

    def _has_ended(self, places: Any) -> npt.NDArray[np.bool_]:
        """Whether an episode ended at ``(slots, environments)``, time limits included."""
        ended: npt.NDArray[np.bool_]
        ended = (self.dones[places] + self.timeouts[places] if self._flags is None else self._flags[places]) > 0
        return ended


def _fit_into_bytes(space: spaces.Space[Any]) -> bool:
    """Whether all actions of a space are integers from 0 to 255, and SB3 uses more than a byte for each."""
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete) or np.dtype(space.dtype).itemsize == 1:
        return False
    start = getattr(space, "start", 0)  # MultiDiscrete has it in newer versions of Gymnasium only
    ends = start + (space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n)
    return bool(np.min(start) >= 0 and np.max(ends) <= 256)


def _flags_of(dones: npt.ArrayLike, timeouts: npt.ArrayLike) -> Flags | None:
    """``dones`` and ``timeouts`` as flags, or ``None`` if a value is neither 0 nor 1."""
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


def _bytes_of(actions: npt.NDArray[Any]) -> Bytes | None:
    """Actions as bytes, or ``None`` if a value does not fit."""
    packed = actions.astype(np.uint8)
    return packed if (packed == actions).all() else None


_PACK: dict[str, Callable[..., npt.NDArray[np.uint8] | None]] = {"_flags": _flags_of, "_action_bytes": _bytes_of}
