"""The report as a picture, drawn by matplotlib, which is optional."""

from __future__ import annotations

from pathlib import Path

from sb3_extra_buffers.cli.report import Report
from sb3_extra_buffers.cli.report.chart import HEIGHT, WIDTH, Dot, Line, draw

_COLOURS = {"best": "#15803d", "grid": "#d9dce1", "leader": "#60646c", "ours": "#2563eb", "sb3": "#dc2626"}
_TEXT = {"axis": "#60646c"}


def write_plot(path: Path, report: Report) -> None:
    from matplotlib.figure import Figure

    per_inch = 60  # units of the chart
    figure = Figure(figsize=(WIDTH / per_inch, HEIGHT / per_inch + 0.5))
    figure.suptitle(report.env_id)
    axes = figure.add_axes((0, 0, 1, HEIGHT / per_inch / figure.get_figheight()), xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.set_axis_off()
    for mark in draw(report):
        if isinstance(mark, Line):
            axes.plot([mark.x1, mark.x2], [mark.y1, mark.y2], color=_COLOURS[mark.kind], linewidth=0.8)
        elif isinstance(mark, Dot):
            axes.plot(mark.x, mark.y, "o", color=_COLOURS[mark.kind], markersize=2 * mark.radius * 72 / per_inch)
        else:
            aligned = {"start": "left", "middle": "center", "end": "right"}[mark.anchor]
            weight = "bold" if mark.kind == "best" else "normal"
            axes.text(
                mark.x, mark.y, mark.text, color=_TEXT.get(mark.kind, "black"), ha=aligned, weight=weight, size=13
            )
    figure.savefig(path, dpi=120)
