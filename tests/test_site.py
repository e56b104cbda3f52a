"""The documentation site builds without a warning, every link in it leads somewhere, and it loads nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parent.parent


class Links(HTMLParser):
    """What a page points to, what it loads, and the places in it that can be pointed to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attributes if value is not None}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.targets.append(found["href"])
        if tag in ("img", "link", "script", "source"):
            self.loaded += [found[name] for name in ("src", "href") if name in found]


def broken_links(site: Path) -> list[str]:
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    broken = []
    for page, links in pages.items():
        for target in links.targets + links.loaded:
            parts = urlsplit(target)
            if parts.scheme in ("http", "https"):
                if target in links.loaded:
                    broken.append(f"{page.name} loads {target}")
                continue
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if file.is_dir():
                file /= "index.html"
            anchors = pages[file].anchors if file in pages else set()
            if not file.exists() or (parts.fragment and file in pages and parts.fragment not in anchors):
                broken.append(f"{page.name} points to {target}")
    return broken


def test_the_site_builds_and_has_no_broken_links(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site/search/search_index.js").exists(), "from file://, search needs its index as a script"
    assert broken_links(tmp_path / "site") == []
