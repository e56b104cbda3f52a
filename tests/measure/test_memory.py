from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sb3_extra_buffers.measure import memory


def test_memory_that_is_taken_is_seen_and_then_seen_to_be_gone() -> None:
    before = memory.settled_rss()
    array = np.ones(64_000_000, dtype=np.uint8)  # more than what the C library may take from memory that it has kept
    assert memory.rss() - before > 60_000_000
    assert memory.peak_rss() > before + 60_000_000
    del array
    assert memory.settled_rss() - before < 10_000_000


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "1000", "a/memory.current": "400"}, [600]),
        ("0::/../x\n", {"memory.max": "1000", "memory.current": "1200"}, [0]),
        ("3:cpu:/a\n2:memory:/a\n", {"memory/a/memory.limit_in_bytes": "900"}, [900]),
        ("0::/\n", {}, []),
        (
            "0::/a\n",
            {"a/memory.max": "1000", "a/memory.current": "900", "a/memory.stat": "anon 300\ninactive_file 500\n"},
            [600],
        ),
    ],
    ids=["a group above has a limit", "a path of the host", "version 1", "no limit", "files that can be dropped"],
)
def test_limits_of_control_groups(membership: str, files: dict[str, str], left: list[int], tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", membership)
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, text)
    assert memory._cgroup_headroom(tmp_path) == left


def test_no_control_groups(tmp_path: Path) -> None:
    assert memory._cgroup_headroom(tmp_path) == []
    assert memory.available_memory() > 0
