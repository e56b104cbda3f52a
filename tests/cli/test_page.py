"""The report of ``bench``, opened in a browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.cli.report import Report
from sb3_extra_buffers.cli.report.chart import Text, draw
from sb3_extra_buffers.cli.report.page import as_page, write_page
from sb3_extra_buffers.measure.comparison import Comparison, Memory, Result
from sb3_extra_buffers.measure.play_file import PlayFile
from sb3_extra_buffers.measure.recommendation import recommend
from tests.browser import CHROMIUM, open_pages

FIGURES = {
    "SB3 ReplayBuffer": (5.6e9, 683, 785),
    "auto": (39.7e6, 155, 608),
    "delta": (34.6e6, 132, 599),
    "zstd-dict/3": (37.0e6, 388, 2700),
    "zstd-dict/9 x8": (19.3e6, 287, 2780),
    "none": (728.9e6, 212, 620),
}


def make_report(env_id: str = "MsPacmanNoFrameskip-v4") -> Report:
    play = PlayFile(Path("play"), 2000, 4, spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(9))
    results = [
        Result(Memory(name, "delta (auto)" if name == "auto" else name, 8000, int(size), 1.0), size, add, sample)
        for name, (size, add, sample) in FIGURES.items()
    ]
    comparison = Comparison(play, 100_000, 32, results)
    return Report(env_id, "a random policy", comparison, recommend(comparison))


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_it_is_readable_on_a_phone_and_asks_for_nothing(tmp_path: Path) -> None:
    write_page(tmp_path / "report.html", make_report())
    (page,) = open_pages(tmp_path, ["report.html"], tmp_path / "profile")
    assert page.title == "Replay buffers for MsPacmanNoFrameskip-v4"
    assert page.excess == 0
    assert page.requests == []
    assert "Recommended: auto (delta), because it is 141.1 times smaller" in page.text
    assert "replay_buffer_class=CompressedReplayBuffer" in page.text


def test_names_are_text_and_never_markup() -> None:
    page = as_page(make_report(env_id="<script>alert(1)</script>:$title-v0"))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;:$title-v0" in page


def test_labels_of_the_chart_do_not_overlap() -> None:
    report = make_report()
    labels = [mark for mark in draw(report) if isinstance(mark, Text) and mark.kind != "axis"]
    assert {label.text for label in labels} == {report.label(result) for result in report.comparison.results}
    for one in labels:
        for other in labels:
            close = abs(one.x - other.x) < 80 and abs(one.y - other.y) < 12
            assert one is other or one.anchor != other.anchor or not close
