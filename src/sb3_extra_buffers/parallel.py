"""Decide which threads decode a batch, and how many.

* A *team* consists of torch's own OpenMP threads. While torch trains on the CPU, these spin for some milliseconds
  between two operations and leave no core for other threads. They are awake already, so they also decode the batches
  that are sampled between two training steps. This respects ``torch.set_num_threads``. While a GPU trains, they sleep,
  and only a few of them are woken up.
* :func:`run_in_slices` uses a pool of Python threads, for work that releases the GIL. It is for programs where OpenMP
  cannot be used: after a fork, and in threads other than the main one.

numba's own thread pool is not used: it aborts when two Python threads enter it at once, and it does not survive a fork.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

Result = TypeVar("Result")

_MIN_TEAM_BYTES = 1 << 19
"""For smaller batches, synchronising threads takes longer than decoding."""
_MAX_WOKEN_THREADS = 4
"""The largest team while a GPU trains: in larger ones, too often a thread wakes up late (measured on 16 cores)."""
_MIN_SLICE_BYTES = 1 << 22
"""For smaller slices, waking up another core takes longer than its share of the work (measured on Atari batches)."""
_MAX_BACKOFF = 128
"""The longest backoff, in batches. Then the team is tried again, even on a busy machine."""
_TOLERATED_SLOWDOWN = 4
"""A late team leads to a backoff if it takes this many times as long as one thread. Only waking it up takes less."""
_TEAM_SPEEDUP = 1.7
"""The speedup by a team of two threads, for batches just above ``_MIN_TEAM_BYTES``. Larger teams are faster."""
_thread = threading.local()
_pool: ThreadPoolExecutor | None = None
_backoff = _n_alone = 0
"""The length of the current backoff, and how much of it is left, both in batches."""
_time_alone = 0.0
"""The shortest time per byte that a single thread took during the backoff; 0 if it was not measured yet."""
_forked = False


class Team(NamedTuple):
    """Threads that run a kernel: ``n_threads``, started by the C function at the address ``parallel``."""

    parallel: int
    n_threads: int


ALONE = Team(0, 1)


def team_for(n_bytes: int) -> Team | None:
    """The threads that should write ``n_bytes``, or ``None`` if OpenMP cannot be used."""
    global _n_alone
    import torch as th  # imported late: programs without torch can use codecs, too

    n_threads = th.get_num_threads()
    if n_threads > _MAX_WOKEN_THREADS and th.cuda.is_initialized():  # type: ignore[no-untyped-call]
        n_threads = _MAX_WOKEN_THREADS  # a GPU trains, so torch's threads sleep
    if n_threads == 1 or n_bytes < _MIN_TEAM_BYTES or is_alone():
        return ALONE
    parallel = _parallel_function()
    # OpenMP does not survive a fork, and starts further threads for every thread that is not the main one.
    if parallel == 0 or _forked or threading.current_thread() is not threading.main_thread():
        return None
    if _n_alone:
        _n_alone -= 1
        return ALONE
    # Always the same number: for a smaller team, OpenMP would end threads and start them again later.
    return Team(parallel, n_threads)


@contextmanager
def alone() -> Iterator[None]:
    """Decode batches in the calling thread only within the block, to measure how long decoding takes."""
    before, _thread.is_alone = is_alone(), True
    try:
        yield
    finally:
        _thread.is_alone = before


def is_alone() -> bool:
    """Whether the calling thread is in a block of :func:`alone`."""
    return getattr(_thread, "is_alone", False)


def expected_speedup(n_bytes: int) -> float:
    """How many times as fast as :func:`alone` a compiled kernel writes batches of ``n_bytes`` in this thread."""
    import torch as th

    is_main = threading.current_thread() is threading.main_thread() and not _forked
    has_team = n_bytes >= _MIN_TEAM_BYTES and th.get_num_threads() > 1 and is_main and _parallel_function()
    return _TEAM_SPEEDUP if has_team else 1.0


def learn_from(team: Team, n_in_time: int, time: float) -> None:
    """Back off from using a team if most of its threads started too late to help, and the batch took long.

    A team finishes when its last thread does. If other programs keep the cores busy, that takes many times longer than
    decoding. So one thread decodes the next batches before the team is tried again. Each backoff is about twice as long
    as the previous one.

    :param n_in_time: How many threads started before all work was done.
    :param time: The time that the batch took per byte.
    """
    global _backoff, _n_alone, _time_alone
    if team.n_threads == 1:
        if _backoff:
            _time_alone = min(_time_alone or time, time)
    elif n_in_time > team.n_threads // 2 or time < _TOLERATED_SLOWDOWN * _time_alone:
        _backoff = 0
    else:
        _backoff = _n_alone = min(2 * _backoff + 1, _MAX_BACKOFF)
        _time_alone = 0.0


@functools.cache
def _parallel_function() -> int:
    """The address of ``GOMP_parallel(function, argument, n_threads, flags)`` in torch's OpenMP, or 0."""
    import torch as th

    for path in sorted((Path(th.__file__).parent / "lib").glob("libgomp*")):
        try:
            function = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def core_count() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_in_slices(
    work: Callable[[int, int], Result], size: int, n_bytes: int, largest: int | None = None
) -> list[Result]:
    """Call ``work(low, high)`` for consecutive slices of ``range(size)``, in parallel if there is enough work.

    :param n_bytes: How many bytes all slices write in total.
    :param largest: The largest number of elements in a slice.
    """
    n_slices = max(1, min(core_count(), size, n_bytes // _MIN_SLICE_BYTES))
    if largest is not None:
        n_slices = max(n_slices, -(-size // largest))
    slices = list(pairwise(size * i // n_slices for i in range(n_slices + 1)))
    if n_slices == 1 or core_count() == 1 or is_alone():
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


def _after_fork_in_child() -> None:
    """Forget the threads, which do not survive a fork. The child starts its own."""
    global _pool, _forked
    _pool, _forked = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
