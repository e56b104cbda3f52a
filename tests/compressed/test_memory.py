"""What buffers take, measured as resident memory of fresh processes."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.methods import installed

pytest.importorskip("psutil")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="resident memory means something else elsewhere")
methods = pytest.mark.parametrize("method", installed("zstd", "delta"))


@functools.cache
def measured(method: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.compressed.memory_probe", method]
    root = Path(__file__).parents[2]
    return json.loads(subprocess.run(command, cwd=root, capture_output=True, timeout=300, check=True).stdout)


@methods
def test_a_buffer_for_a_million_atari_observations_is_built_at_once_and_takes_nothing(method: str) -> None:
    building = measured(method)["building"]
    assert building["slots"] == 250_000
    assert building["seconds"] < 1
    assert building["grown"] < 50_000_000


@methods
def test_a_transition_takes_its_payload_and_at_most_64_bytes_also_when_overwritten(method: str) -> None:
    filling = measured(method)["filling"]
    for grown in filling["grown"]:
        assert (grown - filling["payload"]) / filling["transitions"] <= 64


@methods
def test_the_report_agrees_with_the_system(method: str) -> None:
    filling = measured(method)["filling"]
    assert filling["reported"] == pytest.approx(filling["grown"][-1], rel=0.2)


@methods
def test_a_deleted_buffer_gives_its_memory_back_without_the_garbage_collector(method: str) -> None:
    filling = measured(method)["filling"]
    assert filling["left"] < 0.1 * filling["grown"][-1]


@pytest.mark.parametrize("method", installed("zstd", "delta", "zstd-dict/3", "auto"))
def test_overwriting_ten_times_takes_no_more_memory(method: str) -> None:
    grown = measured(method)["overwriting"]["grown"]
    assert grown[-1] <= 1.1 * grown[1]
