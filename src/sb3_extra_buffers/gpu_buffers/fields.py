"""Actions, rewards and the like: NumPy arrays for SB3, and a copy of them on the device for sampling.

All fields of a slot lie side by side. Where a kernel appends the observations of a step, it reads these from the host's
memory as well. Otherwise they are sent before the next batch, all new slots in one piece.

The arrays on the host are authoritative. Writes to a NumPy array cannot be observed (``np.copyto``, ``.flat``, views).
So while a user holds the array of a field, or a view of it, batches take their fields from the host. Once all of these
arrays are gone, all fields are sent to the device again. Training never accesses these arrays, so it pays nothing.

Fields that are tensors on the device are written there. They come to the host when somebody needs the host's arrays.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.gpu_buffers.kernels import FieldBatch, FieldRow, uses_triton
from sb3_extra_buffers.gpu_buffers.transfer import Staging, allocator, copy_into, empty, torch_dtype, upload

FIELDS = ("actions", "rewards", "dones", "timeouts")
Shapes = dict[str, tuple[npt.DTypeLike, tuple[int, ...]]]


class Fields:
    """Fields of ``n_slots`` slots, on the host and, where kernels can gather them, on ``device``."""

    copy: th.Tensor | None
    """The fields on the device, ``int32``, (slots, words in a row)."""

    def __init__(self, n_slots: int, shapes: Shapes, device: th.device) -> None:
        self.dtype = np.dtype([(name, *shape) for name, shape in shapes.items()], align=True)
        self.rows = np.zeros(n_slots, dtype=self.dtype)
        self._bytes = self.rows.view(np.uint8).reshape(n_slots, -1)
        row = np.zeros(1, dtype=self.dtype)
        self._prepared_bytes = row.view(np.uint8)
        self._prepared_words = row.view(np.int32)
        self.prepared = {name: row[name][0] for name in self.dtype.names or ()}
        """The fields of a slot that is about to be written."""
        self.foreign: dict[str, npt.NDArray[Any]] = {}
        """Arrays that a user has put in the place of a field."""
        self._lent: dict[int, weakref.ref[npt.NDArray[Any]]] = {}
        self._unsent = 0, n_slots
        """The first slot that the device does not hold yet, and the one after the last. Slots in between are sent."""
        self._only_on_device = np.zeros(n_slots, dtype=bool)
        """Slots that the host does not hold yet."""
        self.copy = None
        self.to(device)

    def to(self, device: th.device) -> None:
        self.fetch()
        self._device = device
        action, (_, n_actions), _ = self._form_of("actions")
        self._action_type = torch_dtype(action)
        words = n_actions * action.itemsize // 4
        offsets = [self._form_of(name)[2] for name in FIELDS]
        self._n_actions = n_actions
        self._constants = (self.dtype.itemsize // 4, words, 1 << (words - 1).bit_length(), *offsets)
        self.copy = None
        self.__dict__.pop("_columns", None)
        if uses_triton(device) and action.itemsize % 4 == 0:
            self.copy = th.zeros((len(self.rows), self.dtype.itemsize // 4), dtype=th.int32, device=device)
            self._staging = Staging(self.copy.shape[1], th.int32, device)
        self._unsent = 0, len(self.rows)

    @cached_property
    def _columns(self) -> dict[str, th.Tensor]:
        """Each field in :attr:`copy`, as a view ``(slots, *shape)`` in the field's dtype."""
        assert self.copy is not None
        columns = {}
        for name in FIELDS:
            dtype, shape, first = self._form_of(name)
            words = self.copy[:, first : first + math.prod(shape) * dtype.itemsize // 4]
            columns[name] = words.view(torch_dtype(dtype)).view(-1, *shape)
        return columns

    def accepts(self, values: Iterable[Any]) -> bool:
        """Whether :meth:`write_tensors` can write these. If not, they must pass through the host."""
        return (
            self.copy is not None
            and not self.are_shared
            and all(isinstance(value, th.Tensor) and value.device == self._device for value in values)
        )

    def write_tensors(self, slot: int, tensors: dict[str, th.Tensor]) -> None:
        """Write fields that are on the device, without waiting for it. Doing it twice does no harm."""
        self._send()
        for name, tensor in tensors.items():
            self._columns[name][slot].copy_(tensor)
        self._only_on_device[slot] = True

    def fetch(self) -> None:
        """Bring to the host what was written on the device."""
        if self.copy is not None and self._only_on_device.any():
            slots = np.flatnonzero(self._only_on_device)
            self._bytes[slots] = self.copy[upload(slots, self._device)].cpu().numpy().view(np.uint8)
            self._only_on_device[:] = False

    def _form_of(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        """The dtype and shape of a field of one slot, and the word at which it begins there."""
        field, offset, *_ = self.dtype.fields[name]  # type: ignore[index]  # it has fields
        return *(field.subdtype or (field, ())), offset // 4

    @property
    def are_shared(self) -> bool:
        """Whether others may be writing to a field."""
        return bool(self._lent or self.foreign)

    def lend(self, name: str) -> npt.NDArray[Any]:
        """A field as SB3 knows it, ``(n_slots, *shape)``."""
        self.fetch()
        if name in self.foreign:
            return self.foreign[name]
        # Views of an array refer to it, and not to what it is itself a view of, only where that is no array.
        array = np.asarray(memoryview(self.rows[name]))  # type: ignore[arg-type]  # arrays are buffers
        key = id(array)
        self._unsent = 0, len(self.rows)
        self._lent[key] = weakref.ref(array, lambda _: self._lent.pop(key))
        return array

    def peek(self, name: str) -> npt.NDArray[Any]:
        """A field, to be read at once. Slots that were written on the device may be missing: see :meth:`fetch`."""
        return self.foreign.get(name, self.rows[name])

    def row_for(self, slot: int) -> FieldRow | None:
        """What was entered into :attr:`prepared`, for the kernel that appends observations to write it to ``slot``.

        ``None`` where it is sent later, together with what has not been sent before.
        """
        if self.copy is None or self._unsent[0] != self._unsent[1]:
            return None
        row = self._staging.next()
        self._staging.arrays[row][: self.copy.shape[1]] = self._prepared_words
        return FieldRow(self._staging.tensors[row], self.copy, slot)

    def write(self, slot: int, is_sent: bool) -> None:
        """Put what was entered into :attr:`prepared` into a slot.

        :param is_sent: Whether the device has it.
        """
        if not is_sent:
            first, stop = self._unsent
            if not first <= slot <= stop:  # the buffer is full, and starts again
                self._send()
                first = stop = slot
            self._unsent = first, max(stop, slot + 1)
        self._bytes[slot] = self._prepared_bytes
        self._only_on_device[slot] = False
        for name, array in self.foreign.items():
            array[slot] = self.prepared[name]

    def _send(self) -> None:
        first, stop = self._unsent
        if self.copy is not None and first < stop:
            copy_into(self.copy[first:stop], self._bytes[first:stop].view(np.int32))
        self._unsent = stop, stop

    def batch(self, n: int) -> FieldBatch | None:
        """For a kernel that gathers the fields of ``n`` transitions; ``None`` where they must come from the host."""
        if self.copy is None or self.are_shared:
            return None
        self._send()
        new_number = allocator((n, 1), th.float32, self._device)
        actions = empty((n, self._n_actions), self._action_type, self._device)
        return FieldBatch(self.copy, actions, new_number(), new_number(), self._constants)

    def from_host(self, slots: Indices, envs: Indices) -> tuple[th.Tensor, ...]:
        """Actions, rewards and dones, sent to the device, as SB3 does it."""
        self.fetch()
        actions, rewards, dones, timeouts = (self.peek(name)[slots, envs] for name in FIELDS)
        arrays = actions, rewards[:, None], (dones * (1 - timeouts))[:, None]
        return tuple(upload(array, self._device) for array in arrays)

    def check(self) -> None:
        """Raise an error unless the device holds the host's rows."""
        if self.copy is None or self.are_shared:
            return
        self.fetch()
        self._send()
        if not np.array_equal(self.copy.cpu().numpy(), self._bytes.view(np.int32)):
            raise CorruptDataError("The device does not hold the host's actions, rewards, dones or timeouts.")


def field_property(name: str) -> Any:
    """A field as an attribute of a buffer, which has its :class:`Fields` in ``_fields``."""

    def get(buffer: Any) -> npt.NDArray[Any]:
        fields = buffer.__dict__.get("_fields")
        if fields is None:  # SB3's constructor is at work
            array: npt.NDArray[Any] = buffer.__dict__[name]
            return array
        return fields.lend(name)  # type: ignore[no-any-return]

    def replace(buffer: Any, array: npt.NDArray[Any]) -> None:
        fields = buffer.__dict__.get("_fields")
        if fields is None:
            buffer.__dict__[name] = array
        else:
            fields.fetch()
            fields.foreign[name] = array  # which stays that of its owner

    return property(get, replace)
