"""What saving and loading takes, measured as resident memory of fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("psutil")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="resident memory means something else elsewhere")


def measured(action: str, path: Path) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.persistence.memory_probe", action, str(path)]
    root = Path(__file__).parents[2]
    return json.loads(subprocess.run(command, cwd=root, stdout=subprocess.PIPE, timeout=300, check=True).stdout)


def test_neither_saving_nor_loading_needs_the_buffer_twice(tmp_path: Path) -> None:
    """By pickle, as SB3 saves it, and without."""
    path = tmp_path / "buffer"
    for action in ("save", "load"):
        found = measured(action, path)
        assert found["live"] > 150_000_000
        for way in ("pickle", "save"):
            assert found[way] <= 1.15 * found["live"] + 64_000_000, (action, way)
    for file in (path, path.with_suffix(".pkl")):
        assert file.stat().st_size <= 1.02 * found["live"]


def test_a_conversion_needs_no_second_copy(tmp_path: Path) -> None:
    found = measured("convert", tmp_path)
    assert found["raw"] > 150_000_000
    assert found["there"] <= 0.1 * found["raw"] + 64_000_000
    assert found["back"] <= 1.1 * found["raw"] + 64_000_000
