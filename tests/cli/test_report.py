"""The report of ``bench`` as a page and as a picture."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.cli.report import Report
from sb3_extra_buffers.measure.comparison import Comparison, Memory, Result
from sb3_extra_buffers.measure.recommendation import recommend
from sb3_extra_buffers.measure.transitions import TransitionFile

pytest.importorskip("matplotlib")

FIGURES = {
    "SB3 ReplayBuffer": (5.6e9, 683, 785),
    "auto": (39.7e6, 155, 608),
    "delta": (34.6e6, 132, 599),
    "zstd-dict/3": (37.0e6, 388, 2700),
    "zstd-dict/9 x8": (19.3e6, 287, 2780),
    "none": (728.9e6, 212, 620),
}


def make_report(env_id: str = "MsPacmanNoFrameskip-v4") -> Report:
    data = TransitionFile(Path("data"), 2000, 4, spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(9))
    results = [
        Result(Memory(name, "delta (auto)" if name == "auto" else name, 8000, int(size), 1.0), size, add, sample)
        for name, (size, add, sample) in FIGURES.items()
    ]
    comparison = Comparison(data, 100_000, 32, results)
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


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    page = written(make_report(env_id="<script>alert(1)</script>:$title-v0"), tmp_path)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;:$title-v0" in page
