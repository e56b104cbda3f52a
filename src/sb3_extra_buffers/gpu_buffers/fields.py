"""Actions, rewards, dones and timeouts: NumPy arrays for SB3, and a copy on the device for sampling.

All fields of a slot are one row. If a kernel appends the observations of a step, the same launch copies the row from
pinned host memory. Otherwise rows are sent before the next batch, all new ones in one copy.

The arrays on the host are authoritative. Writes to a NumPy array cannot be observed (``np.copyto``, ``.flat``, views).
So while a user holds the array of a field, or a view of it, batches take their fields from the host. Once these arrays
are gone, all fields are sent to the device again. Training never accesses these arrays, so it pays nothing.

Fields that ``add`` gets as tensors on the device are written there. They are copied to the host when its arrays are
needed.
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
    """The fields of ``n_slots`` slots, on the host and, if kernels can gather them, on ``device``."""

    copy: th.Tensor | None
    """The fields on the device, ``int32``, (slots, words in a row); ``None`` if no kernel can gather them."""

    def __init__(self, n_slots: int, shapes: Shapes, device: th.device) -> None:
        self.dtype = np.dtype([(name, *shape) for name, shape in shapes.items()], align=True)
        self.rows = np.zeros(n_slots, dtype=self.dtype)
        self._bytes = self.rows.view(np.uint8).reshape(n_slots, -1)
        row = np.zeros(1, dtype=self.dtype)
        self._prepared_bytes = row.view(np.uint8)
        self._prepared_words = row.view(np.int32)
        self.prepared = {name: row[name][0] for name in self.dtype.names or ()}
        """The fields of the slot that is about to be written: views of one row."""
        self.foreign: dict[str, npt.NDArray[Any]] = {}
        """Arrays that a user has assigned to a field, such as ``buffer.rewards = ...``."""
        self._lent: dict[int, weakref.ref[npt.NDArray[Any]]] = {}
        """Arrays of fields that a user still holds, by ``id``."""
        self._unsent = 0, n_slots
        """The slots that are not on the device yet: from the first number up to, but not including, the second."""
        self._only_on_device = np.zeros(n_slots, dtype=bool)
        """Whether each slot was written on the device and is not on the host yet."""
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

    def device_tensors(self) -> list[th.Tensor]:
        """Everything on the device that kernels read or write."""
        return [] if self.copy is None else [self.copy, self._staging.sent]

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
        """Whether :meth:`write_tensors` can write these values. If not, they must pass through the host."""
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
        """Copy slots that were written on the device to the host."""
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
        """Whether a user may be writing to the array of a field."""
        return bool(self._lent or self.foreign)

    def lend(self, name: str) -> npt.NDArray[Any]:
        """Return a field as SB3's array, ``(n_slots, *shape)``, and note that the caller may write to it."""
        self.fetch()
        if name in self.foreign:
            return self.foreign[name]
        # A view of a view refers to the array that owns the memory, so the view in between may die. NumPy does not look
        # past an array that is made from a memoryview: views of this one keep it alive.
        array = np.asarray(memoryview(self.rows[name]))  # type: ignore[arg-type]  # arrays are buffers
        key = id(array)
        self._unsent = 0, len(self.rows)
        self._lent[key] = weakref.ref(array, lambda _: self._lent.pop(key))
        return array

    def peek(self, name: str) -> npt.NDArray[Any]:
        """A field, to be read at once. Call :meth:`fetch` first if slots may have been written on the device."""
        return self.foreign.get(name, self.rows[name])

    def row_for(self, slot: int) -> FieldRow | None:
        """The fields in :attr:`prepared`, for the kernel that appends observations to write them to ``slot``.

        ``None`` if earlier slots wait to be sent. This slot is then sent with them.
        """
        if self.copy is None or self._unsent[0] != self._unsent[1]:
            return None
        row = self._staging.next()
        self._staging.arrays[row][: self.copy.shape[1]] = self._prepared_words
        return FieldRow(self._staging.tensors[row], self.copy, slot)

    def write(self, slot: int, is_sent: bool) -> None:
        """Write the fields in :attr:`prepared` to a slot.

        :param is_sent: Whether a kernel already writes them on the device.
        """
        if not is_sent:
            first, stop = self._unsent
            if not first <= slot <= stop:  # the buffer was full, and overwrites its oldest slots
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
        """What a kernel needs to gather the fields of ``n`` transitions; ``None`` if they must come from the host."""
        if self.copy is None or self.are_shared:
            return None
        self._send()
        new_number = allocator((n, 1), th.float32, self._device)
        actions = empty((n, self._n_actions), self._action_type, self._device)
        return FieldBatch(self.copy, actions, new_number(), new_number(), self._constants)

    def from_host(self, slots: Indices, envs: Indices) -> tuple[th.Tensor, ...]:
        """Actions, rewards and dones of a batch, gathered on the host and sent to the device."""
        self.fetch()
        actions, rewards, dones, timeouts = (self.peek(name)[slots, envs] for name in FIELDS)
        arrays = actions, rewards[:, None], (dones * (1 - timeouts))[:, None]
        return tuple(upload(array, self._device) for array in arrays)

    def check(self) -> None:
        """Raise an error unless the rows on the device equal those on the host."""
        if self.copy is None or self.are_shared:
            return
        self.fetch()
        self._send()
        if not np.array_equal(self.copy.cpu().numpy(), self._bytes.view(np.int32)):
            raise CorruptDataError("The device does not hold the host's actions, rewards, dones or timeouts.")


def field_property(name: str) -> Any:
    """A property of a buffer that reads and replaces a field of its ``_fields``."""

    def get(buffer: Any) -> npt.NDArray[Any]:
        fields = buffer.__dict__.get("_fields")
        if fields is None:  # SB3's constructor is running
            array: npt.NDArray[Any] = buffer.__dict__[name]
            return array
        return fields.lend(name)  # type: ignore[no-any-return]

    def replace(buffer: Any, array: npt.NDArray[Any]) -> None:
        fields = buffer.__dict__.get("_fields")
        if fields is None:
            buffer.__dict__[name] = array
        else:
            fields.fetch()
            fields.foreign[name] = array  # not a copy: later writes of its owner count

    return property(get, replace)
