"""Calls that only some systems have can be missing: the library then does the same in another way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sb3_extra_buffers import parallel
from sb3_extra_buffers.errors import SaveError
from sb3_extra_buffers.measure import memory as measured
from sb3_extra_buffers.storage import memory

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="takes away what Linux has")
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_buffers_work_without_the_calls_that_a_system_lacks(system: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.platform_probe", system],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"works without what {system} lacks\n"


def test_cores_are_counted_without_affinities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert parallel.core_count() == 6


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no resource module")
def test_the_peak_is_known_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measured, "_PROCESS_STATUS", tmp_path / "missing")
    assert measured.peak_rss() >= 0.9 * measured.rss()


def test_the_peak_is_known_on_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measured, "_PROCESS_STATUS", tmp_path / "missing")
    monkeypatch.setattr(measured, "sys", SimpleNamespace(platform="win32"))
    info = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=123))
    monkeypatch.setattr(measured, "psutil", SimpleNamespace(Process=lambda: info))
    assert measured.peak_rss() == 123


def test_memory_is_settled_where_the_c_library_cannot_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "sys", SimpleNamespace(platform="darwin"))
    assert measured.settled_rss() > 0


@pytest.mark.parametrize("call", ["posix_fallocate", "truncate"])
def test_a_full_disk_is_an_error_with_and_without_fallocate(
    call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    if call == "truncate":
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    elif not hasattr(os, "posix_fallocate"):
        pytest.skip("this system has no posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", full)
    file = SimpleNamespace(fileno=lambda: 0, truncate=full)
    with pytest.raises(SaveError, match="No space left on device"):
        memory._reserve(file, 10, tmp_path / "file")
