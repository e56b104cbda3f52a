"""Fields of replay buffers in fewer bytes than SB3 has for them.

``dones`` and ``timeouts``, two arrays of float32 in SB3, share one byte per transition. Discrete actions, int64 in SB3,
take one byte each. An array that the user accesses, or that gets a value that does not fit, becomes SB3's array.
"""

from __future__ import annotations

from collections.abc import Mapping
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
"""1 if the episode ended with the transition, 3 if it ended because of a time limit."""
_BITS = {"dones": 0, "timeouts": 1}
_PACKED_AS = {"dones": "_flags", "timeouts": "_flags", "actions": "_action_bytes"}
DONE_OR_NOT = np.array([0, 1, 0, 0], dtype=np.float32)
"""``dones`` of a batch, for each value of a flag. SB3 does not count a time limit as done."""
_ONE = np.float32(1).view(np.uint32)
_PIECE = 1 << 14


class _PackedField:
    """A field as SB3 has it. Reading it unpacks it for good, because the caller may change the array."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, buffer: PackedFields | None, owner: type | None = None) -> Any:
        if buffer is None:
            return self
        buffer._unpack(self._name)
        try:
            return vars(buffer)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, buffer: PackedFields, array: npt.NDArray[Any]) -> None:
        buffer._unpack(self._name)
        vars(buffer)[self._name] = array


class PackedFields(BaseCompressedBuffer, ReplayBuffer):
    """A replay buffer whose fields are packed until one of them is read, or does not fit."""

    dones = _PackedField()
    timeouts = _PackedField()
    actions = _PackedField()
    _flags: Flags | None = None
    _action_bytes: Bytes | None = None
    """The actions of all transitions, one after the other."""
    _rebuilt: ClassVar[tuple[str, ...]] = ("_flags", "_action_bytes")

    def _create_state(self) -> None:
        super()._create_state()
        self._action_shape, self._action_dtype = (self.n_envs, self.action_dim), self.actions.dtype
        if self._can_pack("dones"):
            del vars(self)["dones"], vars(self)["timeouts"]
            self._flags = np.zeros((self.buffer_size, self.n_envs), dtype=np.uint8)
        if self._can_pack("actions"):
            self._action_bytes = np.zeros(vars(self).pop("actions").size, dtype=np.uint8)

    def _restore(self, state: SavedState) -> None:
        super()._restore(state)
        if self._can_pack("dones"):
            self._pack_flags()
        if self._can_pack("actions"):
            self._pack_actions()

    def _restore_pickle_of_dev0(self, attributes: dict[str, Any]) -> None:
        super()._restore_pickle_of_dev0(attributes)
        self._action_shape, self._action_dtype = (self.n_envs, self.action_dim), self.actions.dtype

    def _can_pack(self, name: str) -> bool:
        """Not if the arrays are in files, a derived class stores them in another way, or actions need more bits."""
        is_ours = self._folder is None and isinstance(getattr(type(self), name), _PackedField)
        return is_ours and (name != "actions" or _fit_into_bytes(self.action_space))

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

    def _pack_actions(self) -> None:
        """Replace the array of actions by bytes, unless a value does not fit."""
        actions = self.actions.reshape(-1)
        packed = np.zeros(actions.size, dtype=np.uint8)
        for start in range(0, actions.size, _PIECE):
            piece = slice(start, start + _PIECE)
            packed[piece] = actions[piece]
            if (packed[piece] != actions[piece]).any():
                return
        self._action_bytes = packed
        del vars(self)["actions"]

    def _unpack(self, name: str) -> None:
        """Replace packed values by the arrays that SB3 has, for this field and those that are packed with it."""
        packed = _PACKED_AS[name]
        if getattr(self, packed) is not None:
            with self._lock.held:
                if getattr(self, packed) is not None:  # no other thread was faster
                    vars(self).update({one: self._field_rows(one) for one in _PACKED_AS if _PACKED_AS[one] == packed})
                    setattr(self, packed, None)

    def _flags_or_arrays(self, done: npt.NDArray[Any], timeouts: npt.ArrayLike) -> Any:
        """The dones and timeouts of a step as flags, or both arrays if they cannot be packed."""
        if self._flags is not None:
            flags = flags_of(done, timeouts)
            if flags is not None:
                return flags
            self._unpack("dones")
        return done, timeouts

    def _bytes_or_array(self, action: npt.NDArray[Any]) -> bytes | npt.NDArray[Any]:
        """The actions of a step as bytes, or the array if they cannot be packed."""
        if self._action_bytes is not None:
            try:
                return bytes(action.ravel().tolist())  # several times faster than NumPy for a few numbers
            except ValueError:  # not in range(256)
                self._unpack("actions")
        return action

    def _field_rows(self, name: str, slots: Indices | None = None) -> npt.NDArray[Any]:
        if name == "actions" and self._action_bytes is not None:
            packed = self._action_bytes.reshape(self.buffer_size, *self._action_shape)
            return (packed if slots is None else packed[slots]).astype(self._action_dtype)
        if name in _BITS and self._flags is not None:
            return unpacked(self._flags if slots is None else self._flags[slots], name)
        return super()._field_rows(name, slots)

    def _place_rows(self, slots: Indices, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        rows = dict(rows)
        if self._flags is not None:
            flags = flags_of(rows["dones"], rows["timeouts"])
            if flags is not None:
                self._flags[slots] = flags
                del rows["dones"], rows["timeouts"]
        if self._action_bytes is not None and "actions" in rows:
            small = rows["actions"].astype(np.uint8)
            if (small == rows["actions"]).all():
                self._action_bytes.reshape(self.buffer_size, *self._action_shape)[slots] = small
                del rows["actions"]
        super()._place_rows(slots, rows)

    def memory_usage(self) -> MemoryUsage:
        usage, filled, saved = super().memory_usage(), self.size() / self.buffer_size, 0
        if self._flags is not None:
            saved += 7 * round(filled * self._flags.nbytes)  # SB3 has 8 bytes where this has one
        if self._action_bytes is not None:
            saved += (self._action_dtype.itemsize - 1) * round(filled * self._action_bytes.nbytes)
        return replace(usage, raw_equivalent=usage.raw_equivalent + saved)

    def _actions_at(self, places: Indices) -> npt.NDArray[Any]:
        """``actions`` of a batch, (n, action_dim)."""
        packed = self._action_bytes
        if packed is not None:
            return packed.reshape(-1, self.action_dim).take(places, axis=0).astype(self._action_dtype)
        found: npt.NDArray[Any] = self.__dict__["actions"].reshape(-1, self.action_dim).take(places, axis=0)
        return found

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


def _fit_into_bytes(space: spaces.Space[Any]) -> bool:
    """Whether all actions of a space are numbers below 256, and SB3 has more than a byte for each."""
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete) or np.dtype(space.dtype).itemsize == 1:
        return False
    start = getattr(space, "start", 0)  # which MultiDiscrete did not always have
    ends = start + (space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n)
    return bool(np.min(start) >= 0 and np.max(ends) <= 256)


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
