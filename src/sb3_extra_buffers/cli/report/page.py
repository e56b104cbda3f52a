"""The report as one page of HTML that needs nothing but itself: no script, no font, no network."""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from sb3_extra_buffers import __version__
from sb3_extra_buffers.cli.report import Report
from sb3_extra_buffers.cli.report.chart import as_svg


def write_page(path: Path, report: Report) -> None:
    path.write_text(as_page(report), encoding="utf-8")


def as_page(report: Report) -> str:
    template = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    code = report.recommendation.code
    return template.substitute(
        title=escape(f"Replay buffers for {report.env_id}"),
        summary=escape(report.summary),
        advice=escape(f"Recommended: {report.advice}"),
        code=f"<pre><code>{escape(code)}</code></pre>" if code else "",
        chart=as_svg(report),
        table=_table(report),
        how=escape(report.how),
        version=escape(__version__),
    )


def _table(report: Report) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in report.headings)
    rows = []
    for result in report.comparison.results:
        first, *others = report.cells(result)
        mark = ' class="best"' if result is report.recommendation.result else ""
        cells = f'<th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in others)
        rows.append(f"<tr{mark}>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
