"""Actions, rewards and the like: NumPy arrays for SB3, and a copy of them on the device for sampling.

All fields of a slot lie side by side, so that what changed since the last sample crosses the bus in one piece.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.gpu_buffers.transfer import Outbox, torch_dtype

Shapes = dict[str, tuple[npt.DTypeLike, tuple[int, ...]]]


class Changes:
    """Slots that were written since the last look: the ones from ``first`` to ``first + count - 1``, round the end."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.first = 0
        self.count = 0

    def note(self, slot: int) -> None:
        if self.count == 0:
            self.first, self.count = slot, 1
        elif slot == (self.first + self.count) % self.n_slots:
            self.count = min(self.count + 1, self.n_slots)
        elif (slot - self.first) % self.n_slots >= self.count:
            self.note_all()

    def note_all(self) -> None:
        self.first, self.count = 0, self.n_slots

    def take(self) -> list[slice]:
        """The slots as one or two slices; they then no longer count as changed."""
        first, end = self.first, self.first + self.count
        self.count = 0
        if end <= self.n_slots:
            return [slice(first, end)] if end > first else []
        if end - first >= self.n_slots:
            return [slice(0, self.n_slots)]
        return [slice(first, self.n_slots), slice(0, end - self.n_slots)]


class TrackedArray(np.ndarray[Any, np.dtype[Any]]):
    """A field. Assignments to it are noted; a slot at a time is the case that is fast."""

    changes: Changes | None = None
    whole = False
    """Whether the first axis is that of the slots."""

    def __array_finalize__(self, source: Any) -> None:
        self.changes = getattr(source, "changes", None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: tuple[Any, ...] = (), **kwargs: Any) -> Any:
        plain = [part.view(np.ndarray) if isinstance(part, TrackedArray) else part for part in (*inputs, *out)]
        if out:
            kwargs["out"] = tuple(plain[len(inputs) :])
        found = getattr(ufunc, method)(*plain[: len(inputs)], **kwargs)
        for part in inputs[:1] if method == "at" else out:
            if isinstance(part, TrackedArray) and part.changes is not None:
                part.changes.note_all()
        return out[0] if len(out) == 1 else found

    def fill(self, value: Any) -> None:
        self[...] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if self.changes is None:
            return
        slot = key[0] if isinstance(key, tuple) and key else key
        if self.whole and isinstance(slot, int | np.integer):
            self.changes.note(int(slot) % self.changes.n_slots)
        else:
            self.changes.note_all()


class Fields:
    """Fields of ``n_slots`` slots, on the host and on ``device``."""

    def __init__(self, n_slots: int, shapes: Shapes, device: th.device) -> None:
        self.dtype = np.dtype([(name, *shape) for name, shape in shapes.items()], align=True)
        self.changes = Changes(n_slots)
        self.rows = np.zeros(n_slots, dtype=self.dtype)
        self.to(device)

    def array(self, name: str) -> npt.NDArray[Any]:
        """A field as SB3 knows it, ``(n_slots, *shape)``."""
        array = self.rows[name].view(TrackedArray)
        array.changes, array.whole = self.changes, True
        return array

    def to(self, device: th.device) -> None:
        self.copy = th.zeros((len(self.rows), self.dtype.itemsize), dtype=th.uint8, device=device)
        self._tensors: dict[str, th.Tensor] = {}
        self.changes.note_all()

    def flush(self, outbox: Outbox) -> None:
        """Bring the device up to date, without waiting for it."""
        if not self.changes.count:
            return
        source = self.rows.view(np.uint8).reshape(len(self.rows), -1)
        for part in self.changes.take():
            outbox.put(self.copy, part.start, source[part])

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
        return {name: value for name, value in self.__dict__.items() if name not in ("copy", "_tensors")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.to(th.device("cpu"))
