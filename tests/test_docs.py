"""Every Python block of the README and the documentation runs, and so does the notebook."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEIGHBOURS = {"lerobot.md", "rl-zoo.md", "sbx.md", "torchrl.md"}
"""Pages about packages that are not installed here: tests/neighbours runs their code."""
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


def run_as_script(code: str, folder: Path, **environment: str) -> str:
    """Run ``code`` as a user does who pastes it into a file, by a fresh interpreter, and return what it prints."""
    script = folder / "pasted.py"
    script.write_text(code)
    result = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:sb3_extra_buffers", script.name],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page) and page.name not in NEIGHBOURS], ids=lambda page: page.name
)
def test_code_blocks_run(page: Path, tmp_path: Path) -> None:
    run_as_script("\n".join(blocks(page)), tmp_path)  # the blocks of a page build on each other


def test_the_first_example_of_the_readme_trains_and_says_what_was_saved(tmp_path: Path) -> None:
    printed = run_as_script(blocks(ROOT / "README.md")[0], tmp_path)
    assert "times smaller" in printed, printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_notebook_runs_and_trains_the_same_network_twice(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples" / "tour.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells), "outputs belong to one machine: clear them"
    printed = run_as_script("\n".join(code), tmp_path, OMP_NUM_THREADS="1")
    assert "20 tensors are equal, bit for bit" in printed, printed
    assert "times smaller than SB3's" in printed, printed


def test_the_front_page_has_the_figures_of_the_results_that_are_kept() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import front_page

    table = front_page.markdown(*front_page.load_table())
    for page in front_page.PAGES:
        assert table in page.read_text(), f"{page.name}: run python -m benchmarks.front_page"
    assert front_page.workloads_markdown() in (ROOT / "README.md").read_text(), "run python -m benchmarks.front_page"
