"""Pictures of what a run measured: memory against time, and how memory grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from benchmarks.results import Figure, Table
from benchmarks.sections.replay import BYTES, SAMPLE
from benchmarks.subjects import LIBRARIES, method_of

COLOURS = {"sb3": "#555555", "ours": "#1b7837", "older": "#b35806", "cpprb": "#542788", "torchrl": "#c51b7d"}
TIME = SAMPLE[256]
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "sb3-extra-buffers",  # the same figures give the same file
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
}


def pareto_front(points: dict[str, tuple[float, float]]) -> list[str]:
    """Those that no other beats in one coordinate without losing in the other; smaller is better; by the first."""
    front: list[str] = []
    best = math.inf
    for name, (_, second) in sorted(points.items(), key=lambda item: item[1]):
        if second < best:
            front.append(name)
            best = second
    return front


def points_of(table: Table) -> dict[str, tuple[float, float]]:
    """Bytes per transition and time of ``sample(256)``, of those subjects for which both were measured."""
    points = {}
    for subject in table.subjects:
        memory, time = table.cell(subject, BYTES), table.cell(subject, TIME)
        if isinstance(memory, Figure) and isinstance(time, Figure) and memory.median > 0:
            points[subject] = (memory.median, time.median)
    return points


def draw(tables: Sequence[Table], folder: Path) -> dict[str, str]:
    """Write the pictures, and return their names by the title of the table that they show."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    with mpl.rc_context(STYLE):
        for table in tables:
            if table.section == "replay" and len(points_of(table)) > 1:
                written[table.title] = _save(_memory_against_time(table), folder / f"bench-{_slug(table.title)}.svg")
    return written


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
            edgecolors="black" if on_front else "none",
            linewidths=1.2,
            zorder=3,
        )
    axes.set(xscale="log", yscale="log", xlabel=BYTES, ylabel=TIME, title=table.title)
    _widen(axes)
    _label(axes, points)
    _legend(axes, points)
    return picture


def _label(axes: Axes, points: dict[str, tuple[float, float]]) -> None:
    """Write the method beside each point, above or below so that neighbours do not cover each other."""
    placed: list[tuple[float, float]] = []
    for subject, point in sorted(points.items(), key=lambda item: item[1]):
        x, y = axes.transData.transform(point)
        below = any(abs(x - other_x) < 90 and abs(y - other_y) < 14 for other_x, other_y in placed)
        axes.annotate(
            method_of(subject) or LIBRARIES[_library(subject)].title,
            point,
            xytext=(6, -11 if below else 5),
            textcoords="offset points",
            fontsize=8,
        )
        placed.append((x, y - (16 if below else 0)))


def _widen(axes: Axes) -> None:
    """Room for labels at the right, and for half a decade around what would else fill the picture with noise."""
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


def _slug(title: str) -> str:
    return "-".join(
        "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in title).lower().split()
    )


def _save(picture: Picture, path: Path) -> str:
    picture.savefig(path, metadata={"Date": None})
    return path.name
