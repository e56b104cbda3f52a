"""Tables of results. Each cell has a figure, or the reason why there is none."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """The median of repeated measurements, with the quartiles around it."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        if len(values) < 2:
            (only,) = values
            return cls(only, only, only, 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))


@dataclass(frozen=True)
class Absent:
    """The reason why a cell has no figure."""

    reason: str


Cell = Figure | Absent


@dataclass
class Table:
    """One part of a run, with a row per subject and a column per quantity."""

    name: str
    """The section, followed by the recording if the section has several, as in ``replay-mspacman``."""
    title: str
    columns: list[str]
    """What is measured, with its unit after a comma."""
    rows: dict[str, dict[str, Cell]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def put(self, subject: str, column: str, values: Sequence[float] | Absent) -> None:
        if column not in self.columns:
            raise KeyError(f"{column!r} is no column of {self.title!r}")
        self.rows.setdefault(subject, {})[column] = values if isinstance(values, Absent) else Figure.of(values)

    def put_all(self, column: str, values: dict[str, Any]) -> None:
        """Enter one quantity for many subjects."""
        for subject, found in values.items():
            self.put(subject, column, found)

    def cell(self, subject: str, column: str) -> Cell:
        """The figure, or why there is none. A subject that failed keeps the figures from before."""
        found = self.rows.get(subject, {}).get(column)
        if found is not None:
            return found
        return Absent("failed" if subject in self.failures else "not measured")

    @property
    def subjects(self) -> list[str]:
        return [*self.rows, *(subject for subject in self.failures if subject not in self.rows)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Table:
        rows = {
            subject: {column: Absent(**cell) if "reason" in cell else Figure(**cell) for column, cell in row.items()}
            for subject, row in data["rows"].items()
        }
        return cls(**{**data, "rows": rows})
