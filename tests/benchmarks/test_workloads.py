"""The study that compares workloads with targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.results import Figure
from benchmarks.streams import Stream
from benchmarks.studies import scaling, workloads
from benchmarks.studies.workloads import Effort, Row
from benchmarks.targets import TARGETS, is_within, targets_of


def make_row(name: str = "enduro", method: str = "auto", ratio: float = 2.0, **changes: object) -> Row:
    figure = Figure(ratio, ratio - 0.1, ratio + 0.1, 50)
    calls = ("add", "sample(32)", "sample(256)")
    values = {
        "name": name,
        "method": method,
        "chosen": "delta (auto)",
        "why": "it is the smallest of those that are as fast as SB3",
        "times": {call: {"sb3": Figure(100, 90, 110, 50), "ours": Figure(50, 45, 55, 50)} for call in calls},
        "ratios": dict.fromkeys(calls, figure),
        "add_p99": 80.0,
        "sb3_add_p99": 90.0,
        "longest_add": 900.0,
        "longest_at": "step 511",
        "sb3_longest_add": 100.0,
        "rss_bytes": 500.0,
        "sb3_rss_bytes": 56_000.0,
        "usage_bytes": 450.0,
        "memory_transitions": 12_000,
        "fixed_cost": 1e8,
    }
    return Row(**(values | changes))  # type: ignore[arg-type]


def cells_of(row: Row) -> list[str]:
    return workloads.table([row]).splitlines()[-1].strip("| ").split(" | ")


def test_every_target_that_is_met_is_marked() -> None:
    cells = cells_of(make_row())
    assert cells[2] == "100 → 50 (2.00 ±0.10) ✓"
    assert cells[3] == "80 / 900 at step 511 ✓"
    assert cells[6] == "500 / 450 of 56,000 (0.009) ✓"
    assert sum("✓" in cell for cell in cells) == 5


def test_every_target_that_is_missed_is_marked() -> None:
    row = make_row(ratio=0.5, longest_add=5_001.0, rss_bytes=1_701.0)
    assert sum("✗" in cell for cell in cells_of(row)) == 5


def test_a_dict_whose_keys_share_a_method_names_it_once() -> None:
    assert cells_of(make_row("fetch", chosen="a: none (auto), b: none (auto)"))[7] == "none (auto), all keys"
    assert cells_of(make_row("fetch", chosen="a: none (auto), b: delta (auto)"))[7] == "a: none (auto), b: delta (auto)"


def test_one_game_has_a_target_of_its_own() -> None:
    assert "✓" in cells_of(make_row("enduro", rss_bytes=300.0))[6]
    assert "✗" in cells_of(make_row("mspacman", rss_bytes=300.0))[6]


def test_a_limit_below_one_is_a_share_of_sb3() -> None:
    assert is_within(65, 100, 0.65)
    assert not is_within(66, 100, 0.65)
    assert is_within(1_700, 100, 1_700)


def test_preferring_memory_has_targets_of_its_own() -> None:
    assert targets_of("atari", "auto prefer=memory").add == 0.3
    assert targets_of("atari", "auto prefer=memory").limit_of("pong") == 400
    assert targets_of("vectors", "auto prefer=memory") == TARGETS["vectors"]


def test_the_summary_counts_what_is_met_in_each_group() -> None:
    rows = [make_row("enduro"), make_row("pong", ratio=1.0, rss_bytes=900.0), make_row("ant", rss_bytes=50_000.0)]
    atari, vectors = workloads.summary(rows)
    assert atari.startswith("atari, `auto`, of 2: add ≥ 0.9×: 2; sample(32) ≥ 1.5×: 1; sample(256) ≥ 2.0×: 1;")
    assert "≤ 750 bytes: 1 (target 10)" in atari
    assert "≤ 0.65 of SB3's: 0 (target 1)" in vectors


def test_groups_stand_for_their_workloads() -> None:
    assert workloads.names_of(["rgb", "pong"]) == ["carracing", "crafter", "minigrid", "camera", "procgen", "pong"]
    with pytest.raises(ValueError, match="unknown workload pang; known are atari, rgb, vectors, held-out, mspacman"):
        workloads.names_of(["pang"])


def test_a_measurement_has_a_row_for_each_method_and_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "VECTOR_TRANSITIONS", 400)
    rows, failures = workloads.measure("cartpole", ["none", "no-such-method"], Effort(240, 2, 5), None)
    assert list(failures) == ["cartpole, ours:no-such-method"]
    (row,) = rows
    assert (row.method, row.chosen) == ("none", "none")
    assert row.ratios["add"].count == 4
    assert row.ratios["sample(256)"].count == 2
    assert row.usage_bytes > 0
    assert json.loads(json.dumps(workloads.asdict(row)))["name"] == "cartpole"


def test_results_are_written_as_json_and_as_a_table(tmp_path: Path) -> None:
    run = {"command": "python", "date": "2030-01-01", "machine": "two cores", "load": 0.1}
    workloads.write(tmp_path, run, [make_row()], {"pong, ours:auto": "it failed\nin detail"})
    results = json.loads((tmp_path / "workloads.json").read_text())
    assert results["rows"][0]["ratios"]["add"]["median"] == 2.0
    text = (tmp_path / "workloads.md").read_text()
    assert "| enduro | auto | 100 → 50" in text
    assert "- **Failed:** pong, ours:auto: it failed\n" in text


def test_scaling_finds_percentiles_and_the_longest_add() -> None:
    row = scaling.measure(Stream("noise", 60, 2, 60, 2), "ours:none")
    assert row.transitions == 120
    assert row.add["p50"] <= row.add["p99"] <= row.add["max"]
    assert row.filling["max"] == row.filling["slowest"][0]["time"]
    assert "| noise | 120 | 2 | ours:none |" in scaling.table([row])
