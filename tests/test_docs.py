"""Every Python block of the README and the documentation runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> str:
    return "\n".join(BLOCK.findall(page.read_text()))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_code_blocks_run(page: Path, tmp_path: Path) -> None:
    # The blocks of a page build on each other. In a process of their own, since they start workers.
    program = tmp_path / "page.py"
    body = "\n".join(f"    {line}" if line else "" for line in blocks(page).splitlines())
    program.write_text(f'if __name__ == "__main__":\n{body}\n')
    result = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:sb3_extra_buffers", str(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
