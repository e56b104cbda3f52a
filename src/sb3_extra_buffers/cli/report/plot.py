"""The report as a picture, drawn by matplotlib, which is optional."""

from __future__ import annotations

from pathlib import Path

from sb3_extra_buffers.cli.report import Report
from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.storage.usage import readable

_FORMATS = (".pdf", ".png", ".svg")


def check_plot(path: Path) -> None:
    """Raise an error where :func:`write_plot` could not write this file."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigurationError(f"A plot is written as {', '.join(_FORMATS)}, not as {path.name!r}.")
    require("matplotlib", "A plot", "plots")


def write_plot(path: Path, report: Report) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    comparison, best = report.comparison, report.recommendation.result
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for result in comparison.results:
        colour = "tab:red" if result is comparison.sb3 else "tab:green" if result is best else "tab:blue"
        axes.scatter(result.buffer_bytes, result.time, s=90 if result is best else 50, color=colour)
        axes.annotate(
            report.label(result), (result.buffer_bytes, result.time), xytext=(6, 4), textcoords="offset points", size=9
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, form in ((axes.xaxis, lambda value, _: readable(value)), (axes.yaxis, lambda value, _: f"{value:,.0f}")):
        axis.set_major_formatter(FuncFormatter(form))
        axis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.15, y=0.15)
    axes.grid(alpha=0.3, which="both")
    axes.set_xlabel(f"memory for {comparison.buffer_size:,} transitions")
    axes.set_ylabel(f"add + sample({comparison.batch_size}), µs")
    axes.set_title(f"{report.env_id}; recommended: {report.label(best)}")
    figure.savefig(path, dpi=150)
