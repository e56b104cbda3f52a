"""Plot memory against sampling time, as pictures for light and dark pages."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.transforms import Bbox

from benchmarks.results import Figure, Table
from benchmarks.sections.replay import BYTES, SAMPLE
from benchmarks.subjects import LIBRARIES, method_of

COLOURS = {"sb3": "#555555", "ours": "#1b7837", "older": "#b35806", "cpprb": "#542788", "torchrl": "#c51b7d"}
TIME = SAMPLE[256]
CORNERS: list[tuple[Literal["left", "right"], int]] = list(itertools.product(("left", "right"), (4, -11, 14, -21)))
"""Where a label may go: which of its ends is at the point, and its vertical offset."""
INK, PAPER = "#1f2328", "#ffffff"
"""Colours of text and lines, and of the background, on a light page."""
DARK = {INK: "#e6edf3", PAPER: "#151b23", "#1b7837": "#4cc26d", "#555555": "#a8b0b8", "#542788": "#b18cf0",
        "#c51b7d": "#f27ab8", "#b35806": "#f0943c"}  # fmt: skip
"""The colours of a light page, and what replaces them on a dark page."""
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "sb3-extra-buffers",  # the same figures give the same file
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.15,
}


def pareto_front(points: dict[str, tuple[float, float]]) -> list[str]:
    """The names of the Pareto-optimal points, sorted by the first coordinate. Smaller is better in both."""
    front: list[str] = []
    best = math.inf
    for name, (_, second) in sorted(points.items(), key=lambda item: item[1]):
        if second < best:
            front.append(name)
            best = second
    return front


def points_of(table: Table) -> dict[str, tuple[float, float]]:
    """Bytes per transition and time of ``sample(256)``, for the subjects for which both were measured."""
    points = {}
    for subject in table.subjects:
        memory, time = table.cell(subject, BYTES), table.cell(subject, TIME)
        if isinstance(memory, Figure) and isinstance(time, Figure) and memory.median > 0:
            points[subject] = (memory.median, time.median)
    return points


def draw(tables: Sequence[Table], folder: Path) -> dict[str, str]:
    """Write the pictures, and return their file names by the name of the table that they show."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    with mpl.rc_context(STYLE):
        for table in tables:
            section, _, data = table.name.partition("-")
            if section == "replay" and len(points_of(table)) > 1:
                written[table.name] = f"bench-{data}.svg"
                save(_memory_against_time(table), folder / written[table.name])
    return written


def save(picture: Picture, path: Path) -> None:
    """Write an SVG file that follows the light or dark mode of its reader's system."""
    text = io.StringIO()
    picture.savefig(text, format="svg", metadata={"Date": None})
    rules = [
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    ]
    style = f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"
    head, tag, rest = text.getvalue().partition("<defs>")
    lines = [line.rstrip() for line in f"{head}{style}\n{tag}{rest}".splitlines()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _memory_against_time(table: Table) -> Picture:
    picture = Picture(figsize=(7.2, 4.2), layout="constrained")
    axes = picture.add_subplot()
    points = points_of(table)
    front = pareto_front(points)
    axes.plot(*zip(*(points[subject] for subject in front), strict=True), color="#1b7837", alpha=0.35, linewidth=5)
    for subject, (memory, time) in points.items():
        on_front = subject in front
        axes.scatter(
            memory,
            time,
            s=60,
            color=COLOURS[_library(subject)],
            edgecolors=INK if on_front else "none",
            linewidths=1.2,
            zorder=3,
        )
    axes.set(xscale="log", yscale="log", xlabel=BYTES, ylabel=TIME, title=table.title)
    _widen(axes)
    _legend(axes, points)
    picture.draw_without_rendering()  # labels are placed in pixels, which depend on the layout
    _label(axes, points)
    return picture


def _label(axes: Axes, points: dict[str, tuple[float, float]]) -> None:
    """Write the method beside each point, at the first corner where it covers nothing."""
    places = {subject: axes.transData.transform(point) for subject, point in points.items()}
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in places.values()]
    for subject, point in points.items():
        title = method_of(subject) or LIBRARIES[_library(subject)].title
        for number, (side, offset) in enumerate(CORNERS, 1):
            at = (6 if side == "left" else -6, offset)
            label = axes.annotate(title, point, at, textcoords="offset points", fontsize=8, ha=side)
            box = label.get_window_extent()
            if number == len(CORNERS) or not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            label.remove()


def _widen(axes: Axes) -> None:
    """Make room for labels on the right."""
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** 0.25)


def _legend(axes: Axes, points: dict[str, tuple[float, float]]) -> None:
    libraries = list(dict.fromkeys(_library(subject) for subject in points))
    handles: list[Any] = [
        axes.scatter([], [], s=60, color=COLOURS[name], label=LIBRARIES[name].title) for name in libraries
    ]
    handles += axes.plot([], [], color="#1b7837", alpha=0.35, linewidth=5, label="Pareto front")
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)


def _library(subject: str) -> str:
    return subject.partition(":")[0]
