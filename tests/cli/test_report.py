"""The report of ``bench`` as a page and as a picture."""

from __future__ import annotations

import base64
import itertools
import platform
import re
from dataclasses import replace
from datetime import date
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.cli.report import Report
from sb3_extra_buffers.measure.buffers import SB3, Task
from sb3_extra_buffers.measure.comparison import Comparison, Memory, Point, Result
from sb3_extra_buffers.measure.recommendation import recommend

pytest.importorskip("matplotlib")

FIGURES = {
    SB3: (5.6e9, 683, 785),
    "auto": (39.7e6, 155, 608),
    "delta": (34.6e6, 132, 599),
    "zstd-dict/3": (37.0e6, 388, 2700),
    "zstd-dict/9 x8": (19.3e6, 287, 2780),
    "none": (728.9e6, 212, 620),
}


def point_of(method: str, size: int, settled_after: int) -> Point:
    is_auto = method == "auto"
    return Point(8000, "delta (auto)" if is_auto else method, size, settled_after=settled_after if is_auto else 0)


def make_report(env_id: str = "MsPacmanNoFrameskip-v4", settled_after: int = 0) -> Report:
    task = Task("Replay", spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(9), 4)
    results = [
        Result(Memory(name, [point_of(name, int(size), settled_after)]), size, add, sample)
        for name, (size, add, sample) in FIGURES.items()
    ]
    comparison = Comparison(task, 2000, 100_000, 32, results)
    return Report(env_id, "a random policy", comparison, recommend(comparison))


class Page(HTMLParser):
    """The text of a page, and what it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.loaded: list[str] = []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link")
        self.loaded += [value for name, value in attributes if name in ("src", "href") and value is not None]


def written(report: Report, folder: Path) -> str:
    report.write_page(folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_page_says_what_the_terminal_says_and_loads_nothing(tmp_path: Path) -> None:
    report = make_report()
    page = Page(written(report, tmp_path))
    assert "Replay buffers for MsPacmanNoFrameskip-v4" in page.text
    assert (
        "Recommended: CompressedReplayBuffer with the default settings: 141.1x less memory at 1.92x SB3's speed."
        in page.text
    )
    assert "replay_buffer_class=CompressedReplayBuffer" in page.text
    for result in report.comparison.results:
        for cell in report.cells(result):
            assert cell in page.text
    (chart,) = page.loaded
    assert chart.startswith("data:image/svg+xml;base64,")


def test_the_chart_has_every_method(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    report = make_report()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters instead of outlines
        (chart,) = Page(written(report, tmp_path)).loaded
    picture = ElementTree.fromstring(base64.b64decode(chart.partition(",")[2]))
    text = " ".join("".join(element.itertext()) for element in picture.iter("{http://www.w3.org/2000/svg}text"))
    for result in report.comparison.results:
        assert report.label(result) in text
    assert re.search(r"auto \(delta\) \(recommended\)", text)
    assert "100 MB" in text
    assert "bottom left is best" in text


def test_labels_of_the_chart_do_not_overlap() -> None:
    for factor in (1, 0.3, 1e-4):  # over many powers of ten, over one, and over a fraction of one
        report = make_report()
        results = [
            replace(result, buffer_bytes=1e6 * (result.buffer_bytes / 1e6) ** factor)
            for result in report.comparison.results
        ]
        comparison = replace(report.comparison, results=results)
        figure = replace(report, comparison=comparison, recommendation=recommend(comparison))._chart()
        figure.draw_without_rendering()
        (axes,) = figure.axes
        for axis, side in ((axes.xaxis, 0), (axes.yaxis, 1)):
            labels = [label for label in axis.get_ticklabels(which="both") if label.get_text()]
            spans = sorted((box.min[side], box.max[side]) for box in (label.get_window_extent() for label in labels))
            assert all(end + 4 <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_the_machine_and_the_date_are_given() -> None:
    text = make_report().as_text()
    assert f"Measured on {date.today().isoformat()} on {platform.system()}" in text
    assert "stable-baselines3 2" in text


def test_a_run_that_is_too_short_for_auto_says_so() -> None:
    assert "auto may still change its method: use --steps 2682 or more" in make_report(settled_after=2682).as_text()
    assert "auto may still change" not in make_report().as_text()


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    page = written(make_report(env_id="<script>alert(1)</script>:$title-v0"), tmp_path)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;:$title-v0" in page
