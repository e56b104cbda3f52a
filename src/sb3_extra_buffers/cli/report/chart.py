"""Memory against time as an SVG, both on logarithmic scales. Its colours come from the page around it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from sb3_extra_buffers.cli.report import Report
from sb3_extra_buffers.measure.comparison import Result
from sb3_extra_buffers.storage.usage import readable

_WIDTH, _HEIGHT = 480, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 20, 48
_LABEL_HEIGHT = 16
_LABEL_LETTER = 7
"""About the width of a letter."""


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


def as_svg(report: Report) -> str:
    results, batch_size = report.comparison.results, report.comparison.batch_size
    across = _Scale.around([result.buffer_bytes for result in results], _LEFT, _WIDTH - _RIGHT)
    down = _Scale.around([result.time for result in results], _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for tick in across.ticks():
        x = across(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(_text(x, _HEIGHT - _BOTTOM + 18, readable(tick).replace(".00 ", " "), "middle", "axis"))
    for tick in down.ticks():
        y = down(tick)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{tick:,.0f}", "end", "axis"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        _text(middle, _HEIGHT - 8, f"memory for {report.comparison.buffer_size:,} transitions", "middle", "axis")
    )
    parts.append(_text(8, 12, f"add + sample({batch_size}), µs", "start", "axis"))
    parts += _points(report, across, down)
    title = f"Memory against time of {len(results)} buffers; the table has the same figures."
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"><title>{title}</title>{"".join(parts)}</svg>'


def _points(report: Report, across: _Scale, down: _Scale) -> list[str]:
    """Points with labels beside them, moved apart where they would overlap."""
    parts = []
    labels: list[tuple[float, float, float]] = []  # left, right, baseline
    for result in sorted(report.comparison.results, key=lambda result: -result.time):
        x, y = across(result.buffer_bytes), down(result.time)
        label = report.label(result)
        width = _LABEL_LETTER * len(label)
        on_the_left = x + 10 + width > _WIDTH
        left = x - 10 - width if on_the_left else x + 10
        baseline = y + 4
        while any(
            left < other_right and other_left < left + width and abs(baseline - other) < _LABEL_HEIGHT
            for other_left, other_right, other in labels
        ):
            baseline += 2
        labels.append((left, left + width, baseline))
        anchor = "end" if on_the_left else "start"
        edge = x - 10 if on_the_left else x + 10
        leader = ""
        if baseline - y - 4 > _LABEL_HEIGHT / 2:
            leader = f'<line class="leader" x1="{x:.1f}" y1="{y:.1f}" x2="{edge:.1f}" y2="{baseline - 4:.1f}"/>'
        circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if _kind(report, result) == "best" else 4.5}"/>'
        parts.append(f'<g class="{_kind(report, result)}">{leader}{circle}{_text(edge, baseline, label, anchor)}</g>')
    return parts


def _kind(report: Report, result: Result) -> str:
    if result is report.recommendation.result:
        return "best"
    return "sb3" if result is report.comparison.sb3 else "ours"


def _text(x: float, y: float, text: str, anchor: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
