"""torch's own threads, for kernels.

While torch trains, its OpenMP threads do not sleep between two operations: they wait busily for some milliseconds. A
thread of ours would find no core to run on, so a batch that is sampled between two training steps is decoded by theirs,
which are awake already. This also keeps to ``torch.set_num_threads``.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from pathlib import Path
from typing import NamedTuple

_BYTES_WORTH_A_TEAM = 1 << 20
"""Below this, bringing threads together takes longer than what they would do."""
_forked = False


class Team(NamedTuple):
    """Who runs a kernel: ``n_threads`` threads, brought together by the function at the address ``parallel``."""

    parallel: int
    n_threads: int


ALONE = Team(0, 1)


def team_for(n_bytes: int) -> Team | None:
    """Threads to write ``n_bytes`` with, or ``None`` where torch's are not to be had."""
    import torch as th  # late: codecs are also of use to programs that have no other use for torch

    n_threads = th.get_num_threads()
    if n_threads == 1 or n_bytes < _BYTES_WORTH_A_TEAM:
        return ALONE
    parallel = _parallel_function()
    # OpenMP does not survive a fork, and starts further threads for every thread that is not the main one.
    if parallel == 0 or _forked or threading.current_thread() is not threading.main_thread():
        return None
    # All of them: OpenMP ends threads that a team has no use for, and starts them again for the next one.
    return Team(parallel, n_threads)


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


def _note_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
