"""Memory of a process, as the operating system sees it, and what the machine has left.

Adding up the sizes of stored objects says nothing about holes between them and pages never given back. Measure in a
process that did nothing else before: :func:`~sb3_extra_buffers.measure.processes.run_in_fresh_process`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from pathlib import Path

import psutil

_PROCESS_STATUS = Path("/proc/self/status")


def rss() -> int:
    """Bytes of physical memory that this process holds now."""
    return int(psutil.Process().memory_info().rss)


def settled_rss() -> int:
    """The same once garbage is collected and, with glibc, freed memory is back with the system."""
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    return rss()


def peak_rss() -> int:
    """The most bytes of physical memory that this process ever held."""
    if _PROCESS_STATUS.exists():
        # Linux carries ru_maxrss over from the parent when a process starts; this value begins afresh.
        for line in _PROCESS_STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_memory() -> int:
    """Bytes that a process could take now without swapping, and without being killed by a container's limit."""
    return min([int(psutil.virtual_memory().available), *_left_by_cgroups()])


def _left_by_cgroups(root: Path = Path("/")) -> list[int]:
    """What the limits of this process's control groups, if it has any, leave of memory. ``root`` is for tests."""
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return []
    left = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one tree for all controllers
            tree, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            tree, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # A limit holds for the groups below. In a container, the path may be one of the host's that is not seen here.
        names = [name for name in path.split("/") if name not in ("", "..")]
        for depth in range(len(names) + 1):
            group = tree.joinpath(*names[:depth])
            number = _number_in(group / limit)
            if number is not None:
                left.append(max(0, number - (_number_in(group / usage) or 0) + _cached(group)))
    return left


def _cached(group: Path) -> int:
    """Of what a control group uses: files that the kernel drops as soon as memory is wanted."""
    with contextlib.suppress(OSError, ValueError):
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))
    return 0


def _number_in(file: Path) -> int | None:
    """The number in a file; ``None`` where there is no file, or it says ``max``."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
