"""The results of a run as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.results import Absent, Cell, Figure, Table
from benchmarks.subjects import library_of, method_of

REFERENCE = "sb3"


def page(run: dict[str, Any], tables: Sequence[Table], pictures: dict[str, str]) -> str:
    """The whole report. ``pictures`` maps the names of tables to links to their pictures."""
    parts = [f"# Benchmark results\n\n{_about(run)}"]
    for table in tables:
        parts.append(f"## {table.title}\n\n{markdown(table)}")
        if table.name in pictures:
            parts.append(f"![{table.title}]({pictures[table.name]})")
    return "\n\n".join(parts) + "\n"


def markdown(table: Table) -> str:
    rows = [
        (name_of(subject), *(_text(table, subject, column) for column in table.columns)) for subject in table.subjects
    ]
    notes = [*table.notes, *(f"**Failed:** {reason.splitlines()[0]}" for reason in table.failures.values())]
    return "\n\n".join([markdown_table(("", *table.columns), rows), *notes])


def markdown_table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown, without a line break at its end."""
    lines = ["|" + "".join(f" {head} |" if head else " |" for head in heads), "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def name_of(subject: str) -> str:
    title, method = library_of(subject).title, method_of(subject)
    return f"{title} `{method}`" if method else title


def _text(table: Table, subject: str, column: str) -> str:
    cell = table.cell(subject, column)
    if isinstance(cell, Absent):
        return cell.reason
    return _number(cell) + _factor(table.cell(REFERENCE, column), cell, column, subject)


def _number(cell: Figure) -> str:
    value = f"{cell.median:,.0f}" if abs(cell.median) >= 100 else f"{cell.median:.3g}"
    return f"{value} ±{50 * (cell.high - cell.low) / cell.median:.0f}%" if cell.count > 1 and cell.median else value


def _factor(reference: Cell, cell: Figure, column: str, subject: str) -> str:
    if subject == REFERENCE or isinstance(reference, Absent) or not cell.median or column.startswith("fixed"):
        return ""
    better = cell.median / reference.median if "per second" in column else reference.median / cell.median
    return f" ({better:,.0f}×)" if better >= 1000 else f" ({better:.3g}×)"


def _about(run: dict[str, Any]) -> str:
    versions = ", ".join(f"{name.removesuffix(version).strip()} {version}" for name, version in run["versions"].items())
    return (
        f"Written by `{run['command']}` on {run['date']}: {run['machine']}; {versions}.\n\n"
        "Cells show the median, ± half the interquartile range, and in brackets how many times better than SB3 it is. "
        "Cells without a number say why there is none. `docs/benchmarks.md` explains the columns."
    )
