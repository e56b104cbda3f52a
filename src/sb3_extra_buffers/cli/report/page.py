"""The report as one page of HTML that needs nothing but itself: no script, no font, no network."""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from sb3_extra_buffers import __version__
from sb3_extra_buffers.cli.report import Report
from sb3_extra_buffers.cli.report.chart import HEIGHT, WIDTH, Dot, Line, Mark, Text, draw


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
        chart=_chart(report),
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


def _chart(report: Report) -> str:
    title = "<title>Memory against time; the table has the same figures.</title>"
    marks = "".join(map(_element, draw(report)))
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{title}{marks}</svg>'


def _element(mark: Mark) -> str:
    """An SVG element, whose colour the page's style sheet knows by its class."""
    if isinstance(mark, Line):
        kind, where = "line", f'x1="{mark.x1:.1f}" y1="{mark.y1:.1f}" x2="{mark.x2:.1f}" y2="{mark.y2:.1f}"'
    elif isinstance(mark, Dot):
        kind, where = "circle", f'cx="{mark.x:.1f}" cy="{mark.y:.1f}" r="{mark.radius}"'
    else:
        kind, where = "text", f'x="{mark.x:.1f}" y="{mark.y:.1f}" text-anchor="{mark.anchor}"'
    text = escape(mark.text) if isinstance(mark, Text) else ""
    return f'<{kind} class="{mark.kind}" {where}>{text}</{kind}>'
