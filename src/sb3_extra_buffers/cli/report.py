"""The results of ``bench`` as text, JSON and an HTML page."""

from __future__ import annotations

import base64
import io
import json
import os
import platform
import textwrap
from dataclasses import dataclass, field
from datetime import date
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from sb3_extra_buffers import __version__
from sb3_extra_buffers.cli.common import table
from sb3_extra_buffers.measure.buffers import SB3
from sb3_extra_buffers.measure.comparison import Comparison, Result
from sb3_extra_buffers.measure.environments import describe
from sb3_extra_buffers.measure.recommendation import Recommendation
from sb3_extra_buffers.storage.usage import readable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEXT_WIDTH = 100
_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1.5rem 1rem; max-width: 52rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
img { width: 100%; background: white; }
@media (prefers-color-scheme: dark) { img { filter: invert(0.93) hue-rotate(180deg); } }
pre { padding: .7rem; background: #8882; border-radius: .3rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #8888; white-space: nowrap; }
th:first-child { text-align: left; }
tbody th { font-weight: normal; }
.recommended th, .recommended td { font-weight: bold; }
"""


def _machine() -> str:
    packages = [f"{name} {version(name)}" for name in ("stable-baselines3", "torch", "numpy", "gymnasium")]
    versions = ", ".join([f"Python {platform.python_version()}", *packages, f"sb3-extra-buffers {__version__}"])
    return f"Measured on {date.today().isoformat()} on {platform.platform()} with {os.cpu_count()} cores, {versions}."


@dataclass(frozen=True)
class Report:
    """The results, and the sentences about them that text and page share."""

    env_id: str
    policy: str
    """What chose the actions: ``"a random policy"``, or the name of a file."""
    comparison: Comparison
    recommendation: Recommendation
    machine: str = field(default_factory=_machine)
    """Date, system and versions, for the last line of the legend."""

    @property
    def headings(self) -> tuple[str, ...]:
        size, batch = self.comparison.buffer_size, self.comparison.batch_size
        return ("method", f"memory for {size:,}", "ratio", "add, µs", f"sample({batch}), µs", "speed")

    def cells(self, result: Result) -> tuple[str, ...]:
        sb3 = self.comparison.sb3
        return (
            self.label(result),
            readable(result.buffer_bytes),
            f"{sb3.buffer_bytes / result.buffer_bytes:,.1f}x",
            f"{result.add:,.0f}",
            f"{result.sample:,.0f}",
            f"{sb3.time / result.time:.2f}x",
        )

    def label(self, result: Result) -> str:
        """The method. For ``auto``, the method that it chose follows in brackets."""
        if result.method == SB3:
            return f"SB3 {self.comparison.task.class_name(SB3)}"
        codec = result.memory.codec.replace(" (auto)", "")
        return result.method if result.method != "auto" or codec.startswith("auto") else f"auto ({codec})"

    @property
    def summary(self) -> str:
        comparison = self.comparison
        return (
            f"{self.env_id}: {comparison.steps:,} steps of {self._environments}, played by {self.policy}, "
            f"observations {describe(comparison.task.observation_space)}"
        )

    @property
    def legend(self) -> list[str]:
        """What each column means."""
        comparison, size = self.comparison, self.comparison.buffer_size
        held = f"with {comparison.sb3.memory.transitions:,} transitions"
        extrapolated = f", extrapolated to {size:,}" if comparison.is_extrapolated else ""
        hints = dict.fromkeys(result.memory.hint for result in comparison.results if result.memory.hint)
        return [
            f"memory: RSS growth of a fresh process {held}{extrapolated}.",
            *hints,
            "ratio: SB3's memory divided by this buffer's (above 1.0 = smaller).",
            f"add: mean time of one step of {self._environments}, in buffers that were filled before. sample: median "
            "time of one batch. Calls are interleaved, so that all buffers see the same machine load.",
            "speed: how many times faster one add + one sample is than with SB3's buffer (below 1.0 = slower).",
            self.machine,
        ]

    @property
    def advice(self) -> str:
        return f"Recommended: {self.recommendation.text}"

    @property
    def _environments(self) -> str:
        count = self.comparison.task.n_envs
        return "1 environment" if count == 1 else f"{count} environments"

    def as_text(self) -> str:
        """The report for a terminal."""
        parts = [
            textwrap.fill(self.summary, _TEXT_WIDTH),
            table(self.headings, [self.cells(result) for result in self.comparison.results]),
            "\n".join(textwrap.fill(line, _TEXT_WIDTH, subsequent_indent="  ") for line in self.legend),
            textwrap.fill(self.advice, _TEXT_WIDTH),
        ]
        if self.recommendation.code:
            parts += [
                f"Code to paste (env is your environment):\n\n{textwrap.indent(self.recommendation.code, '    ')}"
            ]
        return "\n\n".join(parts)

    def write_json(self, path: Path) -> None:
        comparison, recommendation = self.comparison, self.recommendation
        data = {
            "environment": self.env_id,
            "player": self.policy,
            "steps": comparison.steps,
            "n_envs": comparison.task.n_envs,
            "buffer": comparison.task.class_name(SB3),
            "buffer_size": comparison.buffer_size,
            "batch_size": comparison.batch_size,
            "extrapolated": comparison.is_extrapolated,
            "results": [
                {
                    "method": result.method,
                    "codec": result.memory.codec,
                    "settled": not result.memory.hint,
                    "transitions": result.memory.transitions,
                    "measured_bytes": result.memory.measured,
                    "bytes_per_transition": result.memory.bytes_per_transition,
                    "buffer_bytes": result.buffer_bytes,
                    "add_microseconds": result.add,
                    "sample_microseconds": result.sample,
                }
                for result in comparison.results
            ],
            "recommended": {
                "method": recommendation.result.method,
                "reason": recommendation.text,
                "code": recommendation.code,
            },
            "machine": self.machine,
        }
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def write_page(self, path: Path) -> None:
        """A self-contained HTML file: it loads no scripts, fonts or other files."""
        chart = io.BytesIO()
        self._chart().savefig(chart, format="svg", metadata={"Date": None})
        image = f"data:image/svg+xml;base64,{base64.b64encode(chart.getvalue()).decode()}"
        title = escape(f"{self.comparison.task.kind} buffers for {self.env_id}")
        code = f"<pre><code>{escape(self.recommendation.code)}</code></pre>" if self.recommendation.code else ""
        page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p>{escape(self.summary)}</p>
<p><strong>{escape(self.advice)}</strong></p>
{code}
<img alt="Chart of memory against time, with the numbers of the table." src="{image}">
<div class="scroll">{self._html_table()}</div>
<ul>{"".join(f"<li>{escape(line)}</li>" for line in self.legend)}</ul>
</body>
</html>
"""
        path.write_text(page, encoding="utf-8")

    def _html_table(self) -> str:
        head = "".join(f"<th>{escape(heading)}</th>" for heading in self.headings)
        rows = []
        for result in self.comparison.results:
            label, *numbers = map(escape, self.cells(result))
            kind = ' class="recommended"' if result is self.recommendation.result else ""
            rows.append(f'<tr{kind}><th scope="row">{label}</th><td>{"</td><td>".join(numbers)}</td></tr>')
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"

    def _chart(self) -> Figure:
        """Memory against time, on logarithmic scales."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(
            title=self.env_id.replace("$", r"\$"),
            xscale="log",
            yscale="log",
            xlabel=f"memory for {self.comparison.buffer_size:,} transitions (bottom left is best)",
            ylabel=f"add + sample({self.comparison.batch_size}), µs",
        )
        for number, result in enumerate(self.comparison.results):
            is_recommended = result is self.recommendation.result
            axes.scatter(
                result.buffer_bytes,
                result.time,
                s=160 if is_recommended else 60,
                marker="*" if is_recommended else "s" if result is self.comparison.sb3 else "o",
                color=f"C{number}" if number < 10 else "black",
                label=f"{self.label(result)}{' (recommended)' if is_recommended else ''}",
            )
        axes.xaxis.set_major_formatter(lambda size, _: readable(size).replace(".00", ""))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        for axis in (axes.xaxis, axes.yaxis):
            smallest, largest = axis.get_view_interval()
            few_labels = largest > 100 * smallest  # more labels would overlap
            axis.set_major_locator(LogLocator(subs=(1,) if few_labels else (1, 2, 5)))
            axis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper", frameon=False)
        return figure
