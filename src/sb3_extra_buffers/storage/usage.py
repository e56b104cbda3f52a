"""A buffer's memory by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class MemoryUsage:
    """The bytes of a buffer with its current contents, by kind, and those of SB3's buffer with the same contents."""

    method: str
    """The method in use; with a Dict space, ``key: method`` for each key."""
    transitions: int
    payload: int
    """Compressed observations."""
    references: int
    """Reference frames, dictionaries, and the newest frames, which are raw."""
    index: int
    """The index, which finds an observation in the payload."""
    fields: int
    """Actions, rewards and so on."""
    raw_equivalent: int
    """The same data in SB3's buffer."""
    choice: str = ""
    """What ``auto`` measured, and why it chose the method."""
    steps_until_settled: int = 0
    """The most steps until ``auto`` has tried all methods that it plans to try; 0 if the method is settled. It may
    still try others later if the data changes."""

    @classmethod
    def of_stores(
        cls, stores: Mapping[str, Any], filled: float, transitions: int, fields: int, raw_equivalent: int
    ) -> MemoryUsage:
        """The usage of a buffer with these stores of observations, ``filled`` from 0 to 1."""
        return cls(
            method=", ".join(f"{key}: {store.label}" if key else store.label for key, store in stores.items()),
            transitions=transitions,
            payload=sum(store.payload_bytes for store in stores.values()),
            references=sum(store.reference_bytes for store in stores.values()),
            index=sum(store.index_bytes(filled) for store in stores.values()),
            fields=fields,
            raw_equivalent=raw_equivalent,
            choice="; ".join(
                f"{key}: {store.choice}" if key else store.choice for key, store in stores.items() if store.choice
            ),
            steps_until_settled=max((store.steps_until_settled for store in stores.values()), default=0),
        )

    @classmethod
    def of_parts(cls, parts: Sequence[MemoryUsage]) -> MemoryUsage:
        """The usage of several buffers together."""
        added = ("transitions", "payload", "references", "index", "fields", "raw_equivalent")
        sums = {name: sum(getattr(part, name) for part in parts) for name in added}
        return replace(parts[0], **sums, steps_until_settled=max(part.steps_until_settled for part in parts))

    @property
    def total(self) -> int:
        return self.payload + self.references + self.index + self.fields

    @property
    def ratio(self) -> float:
        """How many times smaller this is than SB3's buffer."""
        return self.raw_equivalent / self.total if self.total else 1.0

    @property
    def bytes_per_transition(self) -> float:
        return self.total / self.transitions if self.transitions else 0.0

    def __repr__(self) -> str:
        saved = 100 * (1 - self.total / self.raw_equivalent) if self.raw_equivalent else 0.0
        rows = [
            ("payload", self.payload),
            ("references", self.references),
            ("index", self.index),
            ("other fields", self.fields),
            ("total", self.total),
            ("SB3 would take", self.raw_equivalent),
        ]
        lines = [f"{self.transitions:,} transitions, method {self.method}"]
        lines += [f"  {name:<15}{readable(size):>12}" for name, size in rows]
        rate = f"{self.ratio:.1f} times smaller, {self.bytes_per_transition:.0f} bytes per transition"
        lines += [f"  {'saved':<15}{saved:>11.2f}%   {rate}"]
        return "\n".join([*lines, f"  auto: {self.choice}"] if self.choice else lines)


def array_bytes(buffer: Any) -> int:
    """The bytes of all arrays of one of SB3's buffers, which keeps those of Dict observations in dicts."""
    arrays: list[Any] = []
    for value in vars(buffer).values():
        arrays += value.values() if isinstance(value, dict) else [value]
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


def readable(size: float) -> str:
    """Format a number of bytes: ``1.23 MB``."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{size:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
