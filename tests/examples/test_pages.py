"""The code on the pages about recording and training utilities runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"

for package in ("ale_py", "cv2", "imageio_ffmpeg", "PIL", "pygame"):
    pytest.importorskip(package)


@pytest.mark.parametrize("page", ["recording", "training_utils"])
def test_the_code_of_a_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    names: dict[str, object] = {}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{page}.md, block {number}", "exec"), names)
    if page == "recording":
        assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluation.gif", "training.mp4"]
