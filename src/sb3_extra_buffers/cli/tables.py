"""Tables for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns as wide as their widest cell: the first ``left`` begin at the left, the others end at the right."""
    cells = [list(headings), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            f"{cell:<{width}}" if place < left else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], _rule() * max(map(len, lines)), *lines[1:]])


def _rule() -> str:
    """A line, where standard output can show one: not where Windows writes to a file or a pipe."""
    try:
        "─".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "-"
    return "─"
