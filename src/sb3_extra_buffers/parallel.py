"""How many threads decode a batch, and which.

There are two ways to use several cores:

* A *team* is torch's own OpenMP threads. While torch trains, they do not sleep between two operations: they spin for
  some milliseconds and leave no core free for other threads. So a batch that is sampled between two training steps is
  decoded by these threads, which are awake already. This also respects ``torch.set_num_threads``. While a GPU trains,
  they sleep, and only a few of them are woken up.
* :func:`run_in_slices` uses a pool of Python threads, for work that releases the interpreter's lock. It is for programs
  where OpenMP cannot be used: after a fork, and in threads other than the main one.

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

_BYTES_WORTH_A_TEAM = 1 << 19
"""Below this, synchronising threads takes longer than the work that they share."""
_MOST_TO_WAKE = 4
"""With more threads that sleep, it happens too often that one of them comes late (measured on 16 cores)."""
_BYTES_WORTH_A_THREAD = 1 << 22
"""Below this, waking up another core takes longer than its share of the work (measured with Atari batches)."""
_LONGEST_PAUSE = 128
"""In batches. After so many, a busy machine is asked again whether it has time for a team."""
_TOO_LONG = 4
"""How many times as long as one thread alone a team may take if it comes late. Waking it up takes less."""
_TEAM_SPEEDUP = 1.7
"""Of two threads, for batches that are just worth a team. More threads only make it larger."""
_is_alone = False
_pool: ThreadPoolExecutor | None = None
_pause = _n_alone = 0
"""How many batches the last pause had, and how many of the current one are left."""
_time_alone = 0.0
"""What a byte took in the last pause, if it was not disturbed."""
_forked = False


class Team(NamedTuple):
    """Threads that run a kernel: ``n_threads``, started by the C function at the address ``parallel``."""

    parallel: int
    n_threads: int


ALONE = Team(0, 1)


def team_for(n_bytes: int) -> Team | None:
    """Threads to write ``n_bytes`` with, or ``None`` where torch's threads cannot be used."""
    global _n_alone
    import torch as th  # late: codecs are also useful to programs that do not need torch

    n_threads = th.get_num_threads()
    if n_threads > _MOST_TO_WAKE and th.cuda.is_initialized():  # type: ignore[no-untyped-call]
        n_threads = _MOST_TO_WAKE  # a GPU trains, so torch's threads sleep
    if n_threads == 1 or n_bytes < _BYTES_WORTH_A_TEAM or _is_alone:
        return ALONE
    parallel = _parallel_function()
    # OpenMP does not survive a fork, and starts more threads for every thread that is not the main one.
    if parallel == 0 or _forked or threading.current_thread() is not threading.main_thread():
        return None
    if _n_alone:
        _n_alone -= 1
        return ALONE
    # Always the same number: OpenMP ends the threads that a smaller team does not need, and starts them again later.
    return Team(parallel, n_threads)


@contextmanager
def alone() -> Iterator[None]:
    """Within the block, batches are decoded by the thread that asks for them, to measure how long that takes."""
    global _is_alone
    before, _is_alone = _is_alone, True
    try:
        yield
    finally:
        _is_alone = before


def expected_speedup(n_bytes: int) -> float:
    """How many times as fast as :func:`alone` a compiled kernel writes batches of ``n_bytes`` in this thread."""
    import torch as th

    is_main = threading.current_thread() is threading.main_thread() and not _forked
    has_team = n_bytes >= _BYTES_WORTH_A_TEAM and th.get_num_threads() > 1 and is_main and _parallel_function()
    return _TEAM_SPEEDUP if has_team else 1.0


def learn_from(team: Team, n_in_time: int, time: float) -> None:
    """Pause the team if most of it came when the work was done, and that took long.

    The team ends when its last thread has come. Where other programs use all cores, that takes many times longer than
    the work. The pause gets longer as long as that does not change.

    :param n_in_time: How many threads came before.
    :param time: What the work took, for each byte.
    """
    global _pause, _n_alone, _time_alone
    if team.n_threads == 1:
        if _pause:
            _time_alone = min(_time_alone or time, time)
    elif n_in_time > team.n_threads // 2 or time < _TOO_LONG * _time_alone:
        _pause = 0
    else:
        _pause = _n_alone = min(2 * _pause + 1, _LONGEST_PAUSE)
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
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_in_slices(
    work: Callable[[int, int], Result], size: int, n_bytes: int, largest: int | None = None
) -> list[Result]:
    """Call ``work(low, high)`` for consecutive slices of ``range(size)``, in parallel if there is enough work.

    :param n_bytes: How many bytes are written in total.
    :param largest: The most elements in one slice.
    """
    n_slices = max(1, min(core_count(), size, n_bytes // _BYTES_WORTH_A_THREAD))
    if largest is not None:
        n_slices = max(n_slices, -(-size // largest))
    bounds = [size * i // n_slices for i in range(n_slices + 1)]
    slices = list(pairwise(bounds))
    if n_slices == 1 or core_count() == 1 or _is_alone:
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
    """Threads do not survive a fork: the child starts its own."""
    global _pool, _forked
    _pool, _forked = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
