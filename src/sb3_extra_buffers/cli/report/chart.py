"""Memory against time, both on logarithmic scales, as marks that a page and a picture draw alike.

Coordinates are those of SVG: ``y`` counts down from the top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sb3_extra_buffers.cli.report import Report
from sb3_extra_buffers.measure.comparison import Result
from sb3_extra_buffers.storage.usage import readable

WIDTH, HEIGHT = 480, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 20, 48
_LINE_HEIGHT = 16
_LETTER_WIDTH = 7
"""On average, about."""

Kind = Literal["axis", "best", "grid", "leader", "ours", "sb3"]


@dataclass(frozen=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    kind: Kind


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    radius: float
    kind: Kind


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    """Of the baseline."""
    text: str
    anchor: Literal["start", "middle", "end"]
    kind: Kind


Mark = Line | Dot | Text


@dataclass(frozen=True)
class _Scale:
    """From values to pixels."""

    low: float
    high: float
    first: float
    last: float

    @classmethod
    def around(cls, values: list[float], first: float, last: float) -> _Scale:
        """With a margin, and at least a factor of ten wide."""
        low, high = math.log10(min(values)), math.log10(max(values))
        margin = max(0.12 * (high - low), (1 - (high - low)) / 2)
        return cls(low - margin, high + margin, first, last)

    def __call__(self, value: float) -> float:
        return self.first + (math.log10(value) - self.low) / (self.high - self.low) * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Powers of ten, or 1, 2 and 5 times those where there are few."""
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        for factors in ((1,), (1, 3), (1, 2, 5)):
            ticks = [factor * 10.0**decade for decade in decades for factor in factors]
            ticks = [tick for tick in ticks if self.low <= math.log10(tick) <= self.high]
            if len(ticks) >= 3:
                break
        return ticks


def draw(report: Report) -> list[Mark]:
    """The chart's marks, those in front last."""
    results, batch_size = report.comparison.results, report.comparison.batch_size
    across = _Scale.around([result.buffer_bytes for result in results], _LEFT, WIDTH - _RIGHT)
    down = _Scale.around([result.time for result in results], HEIGHT - _BOTTOM, _TOP)
    marks: list[Mark] = []
    for tick in across.ticks():
        x = across(tick)
        marks.append(Line(x, _TOP, x, HEIGHT - _BOTTOM, "grid"))
        marks.append(Text(x, HEIGHT - _BOTTOM + 18, readable(tick).replace(".00 ", " "), "middle", "axis"))
    for tick in down.ticks():
        y = down(tick)
        marks.append(Line(_LEFT, y, WIDTH - _RIGHT, y, "grid"))
        marks.append(Text(_LEFT - 8, y + 4, f"{tick:,.0f}", "end", "axis"))
    memory = f"memory for {report.comparison.buffer_size:,} transitions"
    marks.append(Text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, memory, "middle", "axis"))
    marks.append(Text(8, 12, f"add + sample({batch_size}), µs", "start", "axis"))
    return marks + _points(report, across, down)


def _points(report: Report, across: _Scale, down: _Scale) -> list[Mark]:
    """Points with labels beside them, moved apart where they would overlap."""
    marks: list[Mark] = []
    taken: list[tuple[float, float, float]] = []  # left, right, baseline
    for result in sorted(report.comparison.results, key=lambda result: -result.time):
        x, y, kind = across(result.buffer_bytes), down(result.time), _kind(report, result)
        label = report.label(result)
        width = _LETTER_WIDTH * len(label)
        before = x + 10 + width > WIDTH
        left = x - 10 - width if before else x + 10
        baseline = y + 4
        while any(
            left < other_right and other_left < left + width and abs(baseline - other) < _LINE_HEIGHT
            for other_left, other_right, other in taken
        ):
            baseline += 2
        taken.append((left, left + width, baseline))
        edge = x - 10 if before else x + 10
        if baseline - y - 4 > _LINE_HEIGHT / 2:
            marks.append(Line(x, y, edge, baseline - 4, "leader"))
        marks.append(Dot(x, y, 6 if kind == "best" else 4.5, kind))
        marks.append(Text(edge, baseline, label, "end" if before else "start", kind))
    return marks


def _kind(report: Report, result: Result) -> Kind:
    if result is report.recommendation.result:
        return "best"
    return "sb3" if result is report.comparison.sb3 else "ours"
