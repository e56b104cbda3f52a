"""Resident memory (RSS) of this process, and available memory of the machine.

Resident memory includes fragmentation, and freed pages that the allocator keeps. So measure in a fresh process, with
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
    """Resident memory in bytes, after garbage collection and, with glibc, after returning freed memory."""
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    return rss()


def peak_rss() -> int:
    """Peak resident memory of this process, in bytes."""
    if _PROCESS_STATUS.exists():
        # On Linux, a new process inherits ru_maxrss from its parent, but VmHWM starts at zero.
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
    return min([int(psutil.virtual_memory().available), *_cgroup_headroom()])


def _cgroup_headroom(root: Path = Path("/")) -> list[int]:
    """Bytes left under the memory limit of each control group of this process. ``root`` is for tests."""
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
        # The limits of all parent groups apply. In a container, the path may be one of the host and not exist here.
        names = [name for name in path.split("/") if name not in ("", "..")]
        for depth in range(len(names) + 1):
            group = tree.joinpath(*names[:depth])
            number = _number_in(group / limit)
            if number is not None:
                left.append(max(0, number - (_number_in(group / usage) or 0) + _reclaimable_cache(group)))
    return left


def _reclaimable_cache(group: Path) -> int:
    """Bytes of page cache that the kernel can drop. The usage of the control group includes them."""
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
