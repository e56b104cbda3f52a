"""Memory of a process, as the operating system sees it.

Adding up the sizes of stored objects says nothing about holes between them and pages never given back. Measure in a
process that did nothing else before: :func:`run_in_fresh_process`.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil

P = ParamSpec("P")
T = TypeVar("T")

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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run_in_fresh_process(func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``func`` in a new interpreter and return its result; arguments and result must be picklable."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(func, *args, **kwargs).result()
