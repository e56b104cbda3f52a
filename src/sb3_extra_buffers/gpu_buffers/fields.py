"""Actions, rewards and the like: NumPy arrays for SB3, and a copy of them on the device for sampling.

All fields of a slot lie side by side, so that what changed since the last sample crosses the bus in one piece.

The host's arrays are the truth. There are more ways to write to an array than anyone can watch (``np.copyto``,
``.flat``, a view), so nobody tries to: a field is *lent* to whoever asks for it, and as long as an array that was lent,
or a view of one, is alive, batches take their fields from the host. When the last of them is gone, everything is sent
anew. Training asks for none of them, so it never pays for that.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.gpu_buffers.changes import Changes
from sb3_extra_buffers.gpu_buffers.transfer import Outbox, torch_dtype

Shapes = dict[str, tuple[npt.DTypeLike, tuple[int, ...]]]


class Fields:
    """Fields of ``n_slots`` slots, on the host and on ``device``."""

    def __init__(self, n_slots: int, shapes: Shapes, device: th.device) -> None:
        self.dtype = np.dtype([(name, *shape) for name, shape in shapes.items()], align=True)
        self.changes = Changes(n_slots)
        self.rows = np.zeros(n_slots, dtype=self.dtype)
        self.foreign: dict[str, npt.NDArray[Any]] = {}
        """Arrays that somebody has put in the place of a field."""
        self._lent: dict[int, weakref.ref[npt.NDArray[Any]]] = {}
        self._prepare()
        self.to(device)

    @property
    def are_shared(self) -> bool:
        """Whether others may be writing to a field."""
        return bool(self._lent or self.foreign)

    def lend(self, name: str) -> npt.NDArray[Any]:
        """A field as SB3 knows it, ``(n_slots, *shape)``."""
        if name in self.foreign:
            return self.foreign[name]
        # Views of an array refer to it, and not to what it is itself a view of, only where that is no array.
        array = np.asarray(memoryview(self.rows[name]))  # type: ignore[arg-type]  # arrays are buffers
        key = id(array)
        self._lent[key] = weakref.ref(array, lambda _: self._returned(key))
        return array

    def replace(self, name: str, array: npt.NDArray[Any]) -> None:
        """Take another array for a field, which stays that of its owner."""
        self.foreign[name] = array

    def _returned(self, key: int) -> None:
        self.changes.note_all()
        del self._lent[key]

    def write(self, slot: int) -> None:
        """Put what was entered into :attr:`prepared` into a slot, at one stroke."""
        self.changes.note(slot)
        self._bytes[slot] = self._prepared_bytes
        for name, array in self.foreign.items():
            array[slot] = self.prepared[name]

    def _prepare(self) -> None:
        self._bytes = self.rows.view(np.uint8).reshape(len(self.rows), -1)
        row = np.zeros(1, dtype=self.dtype)
        self._prepared_bytes = row.view(np.uint8)
        self.prepared = {name: row[name][0] for name in self.dtype.names or ()}
        """The fields of a slot that is about to be written."""

    def read(self, name: str, slots: Indices, envs: Indices) -> npt.NDArray[Any]:
        """A field at some places, from the host."""
        found: npt.NDArray[Any] = self.foreign.get(name, self.rows[name])[slots, envs]
        return found

    def to(self, device: th.device) -> None:
        self.copy = th.zeros((len(self.rows), self.dtype.itemsize), dtype=th.uint8, device=device)
        self._tensors: dict[str, th.Tensor] = {}
        self.changes.note_all()

    def flush(self, outbox: Outbox) -> None:
        """Bring the device up to date, without waiting for it. Who is lent a field makes that pointless."""
        if not self.changes.count or self.are_shared:
            return
        for part in self.changes.slices():
            outbox.put(self.copy, part.start, self._bytes[part])
        outbox.when_sent(self.changes.forget)

    def tensor(self, name: str) -> th.Tensor:
        """A field on the device, ``(n_slots, *shape)``."""
        if name not in self._tensors:
            field, offset = self.dtype.fields[name][:2]  # type: ignore[index]  # a dtype with fields
            base, shape = field.subdtype or (field, ())
            part = self.copy[:, offset : offset + field.itemsize]
            self._tensors[name] = part.view(torch_dtype(base)).view(len(self.rows), *shape)
        return self._tensors[name]

    def tensor_of_words(self) -> th.Tensor:
        """All fields on the device, (n_slots, words), as ``int32``."""
        if "" not in self._tensors:
            self._tensors[""] = self.copy.view(th.int32)
        return self._tensors[""]

    def offset(self, name: str) -> int:
        """Where a field begins in a row, in words of 4 bytes."""
        return int(self.dtype.fields[name][1]) // 4  # type: ignore[index]

    def __getstate__(self) -> dict[str, Any]:
        kept = ("dtype", "changes", "rows", "foreign")
        return {name: value for name, value in self.__dict__.items() if name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"foreign": {}, "_lent": {}, **state})
        self._prepare()
        self.to(th.device("cpu"))


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
            fields.replace(name, array)

    return property(get, replace)
