"""The report for a terminal."""

from __future__ import annotations

import textwrap

from sb3_extra_buffers.cli.report import Report
from sb3_extra_buffers.cli.tables import table

_WIDTH = 100


def as_text(report: Report) -> str:
    rows = [report.cells(result) for result in report.comparison.results]
    parts = [
        textwrap.fill(report.summary, _WIDTH),
        table(report.headings, rows),
        textwrap.fill(report.how, _WIDTH),
        textwrap.fill(f"Recommended: {report.advice}", _WIDTH),
    ]
    if report.recommendation.code:
        parts += [f"Paste:\n\n{textwrap.indent(report.recommendation.code, '    ')}"]
    return "\n\n".join(parts)
