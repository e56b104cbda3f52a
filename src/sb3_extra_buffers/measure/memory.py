"""Resident memory of this process, and the memory that is still available.

The memory of a process is more than the sizes of its Python objects: holes between objects count, too, and so do pages
that are never returned to the system. So measure in a fresh process, with
:func:`~sb3_extra_buffers.measure.processes.run_in_fresh_process`.
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
    """Resident memory of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)


def settled_rss() -> int:
    """Resident memory after garbage collection and, with glibc, after freed memory was returned to the system."""
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    return rss()


def peak_rss() -> int:
    """The peak of this process's resident memory, in bytes."""
    if _PROCESS_STATUS.exists():
        # On Linux a new process inherits ru_maxrss from its parent. VmHWM starts at zero.
        for line in _PROCESS_STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_memory() -> int:
    """Bytes that can be allocated without swapping and within the memory limit of a container."""
    return min([int(psutil.virtual_memory().available), *_left_by_cgroups()])


def _left_by_cgroups(root: Path = Path("/")) -> list[int]:
    """What the memory limits of this process's control groups leave. ``root`` is for tests."""
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
        # The limits of all parent groups apply. In a container, the path may belong to the host and not exist.
        names = [name for name in path.split("/") if name not in ("", "..")]
        for depth in range(len(names) + 1):
            group = tree.joinpath(*names[:depth])
            number = _number_in(group / limit)
            if number is not None:
                left.append(max(0, number - (_number_in(group / usage) or 0) + _cached(group)))
    return left


def _cached(group: Path) -> int:
    """The file cache of a control group, which counts as used but which the kernel drops when memory is short."""
    with contextlib.suppress(OSError, ValueError):
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))
    return 0


def _number_in(file: Path) -> int | None:
    """The number in a file, or ``None`` if there is no file or it says ``max``."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
