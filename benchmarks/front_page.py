"""Update the tables and pictures of the front page from the committed results.

    python -m benchmarks.front_page

The first table and the picture of memory against speed are from `benchmarks/results/full`, which `python -m benchmarks
--publish` writes. The second table is from `python -m benchmarks.studies.workloads`, and the learning curves are from
`python -m benchmarks.studies.learning_curves`.
"""

from __future__ import annotations

import csv
import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure as Picture

from benchmarks.plots import COLOURS, STYLE, save
from benchmarks.report import markdown_table
from benchmarks.results import Figure, Table
from benchmarks.sections.replay import ADD_AGAIN, BYTES, SAMPLE
from benchmarks.studies.learning_curves import ENV
from benchmarks.studies.learning_curves import RESULTS as CURVES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "full" / "results.json"
IMAGES = ROOT / "docs" / "images"
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md"]
WORKLOADS = ROOT / "benchmarks" / "results" / "workloads" / "workloads.json"
PART = r"(?<=<!-- {} made by python -m benchmarks.front_page -->\n).*?(?=<!-- end -->)"
PEERS, EXPECTED = (re.compile(PART.format(name), re.DOTALL) for name in ("peers", "workloads"))
SUBJECTS = {
    "sb3": "SB3",
    "ours:auto": "this library, default",
    "ours:auto prefer=memory": "this library, smallest",
    "older:igzip0": "this library, version 0.5",
    "cpprb": "cpprb",
    "torchrl:tensor": "TorchRL",
    "torchrl:compressed": "TorchRL, compressed",
}
"""The buffers in the first table: each library with its default, and with the setting that takes least memory."""
KINDS = {
    "mspacman": "Atari, MsPacman",
    "battlezone": "Atari, BattleZone (3-D)",
    "camera": "MuJoCo camera, stack of 3 RGB images",
    "carracing": "CarRacing, RGB",
    "procgen": "Procgen, RGB",
    "halfcheetah": "HalfCheetah, 17 numbers",
    "humanoid": "Humanoid, 348 numbers",
}
"""The workloads in the second table, one of each kind."""
WINDOW = 20
"""The number of episodes that are averaged for each point of a learning curve."""


def load_table(path: Path = RESULTS) -> tuple[dict[str, Any], Table]:
    data = json.loads(path.read_text())
    tables = [Table.from_json(table) for table in data["tables"]]
    return data["run"], next(table for table in tables if table.name == "replay-mspacman")


def value(table: Table, subject: str, column: str) -> float:
    cell = table.cell(subject, column)
    assert isinstance(cell, Figure), f"{subject} has no figure for {column!r}"
    return cell.median


def markdown(run: dict[str, Any], table: Table) -> str:
    """The first table of the front page, and how it was measured."""
    columns = {BYTES: "bytes per transition", ADD_AGAIN: "`add`, µs", SAMPLE[32]: "`sample(32)`, µs",
               SAMPLE[256]: "`sample(256)`, µs"}  # fmt: skip
    rows = []
    for subject, title in SUBJECTS.items():
        numbers = [f"{value(table, subject, column):,.0f}" for column in columns]
        if subject == "ours:auto":
            title, numbers = f"**{title}**", [f"**{number}**" for number in numbers]
        rows.append((title, *numbers))
    versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("SB3", "this library", "cpprb", "TorchRL"))
    about = (
        f"Measured by `python -m benchmarks` on {run['date']} on two CPU cores, with 20,000 transitions of four "
        f"environments in a full buffer; {versions}."
    )
    return f"\n{markdown_table(('MsPacman, 84×84, stacks of 4', *columns.values()), rows)}\n\n{about}\n\n"


def workloads_markdown(path: Path = WORKLOADS) -> str:
    """The second table: memory and speed to expect with each kind of observations."""
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"] if row["method"] == "auto"}
    measured = ("add", "sample(32)", "sample(256)")
    titles = ["observations", "bytes per transition: SB3 → ours", *(f"`{name}`" for name in measured)]
    cells = []
    for name, title in KINDS.items():
        row = rows[name]
        speeds = (f"{row['ratios'][column]['median']:.2f}x" for column in measured)
        cells.append((title, f"{row['sb3_rss_bytes']:,.0f} → {row['rss_bytes']:,.0f}", *speeds))
    faster = {column: sum(row["ratios"][column]["median"] >= 1 for row in rows.values()) for column in measured}
    summary = ", ".join(f"`{column}` on {count}" for column, count in faster.items())
    about = f"Of all {len(rows)} workloads, ours is at least as fast in {summary}."
    return f"\n{markdown_table(titles, cells)}\n\n{about}\n\n"


def draw_memory_and_speed(table: Table) -> Picture:
    picture = Picture(figsize=(5.6, 3.6), layout="constrained")
    axes = picture.add_subplot()
    for subject, title in SUBJECTS.items():
        colour = COLOURS[subject.partition(":")[0]]
        point = value(table, subject, BYTES), value(table, subject, SAMPLE[256]) / 1000
        ours = subject.startswith("ours")
        axes.scatter(*point, s=130 if ours else 70, color=colour, marker="*" if ours else "o", zorder=3)
        above = -17 if subject == "cpprb" else 9  # another label is above
        weight = "bold" if ours else "normal"
        axes.annotate(
            title, point, (0, above), textcoords="offset points", ha="center", color=colour, fontweight=weight
        )
    axes.set(xscale="log", yscale="log", xlim=(25, 250_000), ylim=(1, 100))
    axes.set(xlabel="bytes per transition, MsPacman (lower left is better)", ylabel="sample(256), ms")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    return picture


def draw_learning_curves(path: Path = CURVES) -> Picture:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    picture = Picture(figsize=(5.6, 2.6), layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    for axes, (algorithm, episodes) in zip(panels, groupby(rows, lambda row: row["algorithm"]), strict=True):
        looks = {
            "SB3": {"color": COLOURS["older"], "alpha": 0.45, "linewidth": 6, "label": "SB3's buffer"},
            "compressed": {"color": COLOURS["ours"], "linewidth": 1.6, "label": "compressed buffer"},
        }
        for buffer, curve in groupby(episodes, lambda row: row["buffer"]):
            steps, returns = np.array([(int(row["step"]), float(row["return"])) for row in curve]).T
            mean = np.convolve(returns, np.ones(WINDOW) / WINDOW, mode="valid")
            axes.plot(steps[WINDOW - 1 :], mean, **looks[buffer])
        axes.set(title=f"{algorithm}, {ENV}", xlabel="steps")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=4)
    panels[0].set_ylabel(f"return, mean of {WINDOW} episodes")
    panels[0].legend(frameon=False, loc="lower right")
    return picture


def main() -> None:
    run, table = load_table()
    with mpl.rc_context(STYLE):
        save(draw_memory_and_speed(table), IMAGES / "memory-and-speed.svg")
        save(draw_learning_curves(), IMAGES / "learning-curves.svg")
    for page in PAGES:
        text = PEERS.sub(lambda _: markdown(run, table), page.read_text(encoding="utf-8"))
        page.write_text(EXPECTED.sub(lambda _: workloads_markdown(), text), encoding="utf-8")


if __name__ == "__main__":
    main()
