"""Work on all cores, outside the interpreter's lock.

numba's own thread pool is not used: it aborts when two Python threads enter it at once and does not survive a fork.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

Result = TypeVar("Result")

_BYTES_WORTH_A_THREAD = 1 << 22
"""Below this, waking another core up takes longer than what it would do (measured with 32 and 256 Atari stacks)."""
_pool: ThreadPoolExecutor | None = None


def core_count() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_in_slices(
    work: Callable[[int, int], Result], size: int, n_bytes: int, largest: int | None = None
) -> list[Result]:
    """Call ``work(low, high)`` for consecutive slices of ``range(size)``, in parallel if there is enough to do.

    ``n_bytes`` are written in all. No slice is longer than ``largest``.
    """
    n_slices = max(1, min(core_count(), size, n_bytes // _BYTES_WORTH_A_THREAD))
    if largest is not None:
        n_slices = max(n_slices, -(-size // largest))
    bounds = [size * i // n_slices for i in range(n_slices + 1)]
    slices = list(pairwise(bounds))
    if n_slices == 1 or core_count() == 1:
        return [work(low, high) for low, high in slices]
    # This thread does its share: the pool has one thread less than there are cores.
    mine = len(slices) // core_count() or 1
    others = [_executor().submit(work, low, high) for low, high in slices[mine:]]
    return [*(work(low, high) for low, high in slices[:mine]), *(other.result() for other in others)]


def _executor() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max(core_count() - 1, 1), thread_name_prefix="sb3-extra-buffers")
    return _pool


def _forget_pool() -> None:
    """Threads do not survive a fork: the child starts its own."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
