"""What goes into tables and pictures."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import plots, report
from benchmarks.results import Absent, Figure, Table
from benchmarks.sections.replay import BYTES, SAMPLE


def make_table() -> Table:
    table = Table("replay-game", "Some game", [BYTES, SAMPLE[256]])
    table.put("sb3", BYTES, [56_448.0])
    table.put("sb3", SAMPLE[256], [900.0, 1_000.0, 1_100.0])
    table.put("ours:auto", BYTES, [400.0])
    table.put("ours:auto", SAMPLE[256], [500.0, 500.0, 500.0])
    table.put("torchrl:compressed", BYTES, Absent("needs 56 GB"))
    table.failures["cpprb"] = "cpprb: fill failed: ValueError: no"
    return table


def test_a_figure_is_the_median_and_the_quartiles() -> None:
    assert Figure.of([5, 1, 2, 4, 3]) == Figure(median=3, low=2, high=4, count=5)
    assert Figure.of([7]) == Figure(7, 7, 7, 1)


def test_a_figure_needs_a_measurement() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        Figure.of([])


def test_a_quantity_that_is_no_column_is_refused() -> None:
    with pytest.raises(KeyError, match="no column"):
        make_table().put("sb3", "luck", [1.0])


def test_cells_without_a_measurement_have_no_number() -> None:
    rows = {row.split(" | ")[0].strip("| "): row for row in report.markdown(make_table()).splitlines()}
    assert rows["TorchRL `compressed`"] == "| TorchRL `compressed` | needs 56 GB | not measured |"
    assert rows["cpprb"] == "| cpprb | failed | failed |"


def test_cells_show_median_spread_and_how_much_better_than_sb3() -> None:
    text = report.markdown(make_table())
    assert "| SB3 | 56,448 | 1,000 ±5% |" in text
    assert "| this library `auto` | 400 (141×) | 500 ±0% (2×) |" in text


def test_failures_are_named_below_the_table() -> None:
    assert "**Failed:** cpprb: fill failed: ValueError: no" in report.markdown(make_table())


def test_tables_survive_json() -> None:
    table = make_table()
    assert Table.from_json(json.loads(json.dumps(table.to_json()))) == table


def test_only_subjects_with_both_quantities_are_points() -> None:
    assert plots.points_of(make_table()) == {"sb3": (56_448, 1_000), "ours:auto": (400, 500)}


def test_pareto_front_is_who_nobody_beats() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        points = {str(name): (float(x), float(y)) for name, (x, y) in enumerate(rng.integers(1, 12, size=(8, 2)))}
        undominated = {
            name
            for name, (x, y) in points.items()
            if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values())
        }
        front = plots.pareto_front(points)
        assert {points[name] for name in front} == {points[name] for name in undominated}
        assert all(points[one] < points[other] for one, other in itertools.pairwise(front))


def test_pictures_are_drawn_and_the_same_each_time(tmp_path: Path) -> None:
    names = plots.draw([make_table()], tmp_path / "one")
    plots.draw([make_table()], tmp_path / "two")
    assert names == {"replay-game": "bench-game.svg"}
    first, second = ((tmp_path / folder / "bench-game.svg").read_bytes() for folder in ("one", "two"))
    assert first == second
    assert re.search(rb"<svg", first)


def test_the_page_shows_each_picture_below_its_table() -> None:
    run = {"command": "python -m benchmarks", "date": "2030-01-01", "machine": "two cores", "versions": {"SB3": "2.9"}}
    text = report.page(run, [make_table()], {"replay-game": "images/game.svg"})
    assert text.index("## Some game") < text.index("![Some game](images/game.svg)")
