"""One lock for a buffer and its stores, so that one thread may add while another samples."""

from __future__ import annotations

import os
import threading
import weakref


class BufferLock:
    """Use as ``with lock.held:``. The lock is re-entrant: a thread that holds it may take it again.

    A fork waits until no other thread holds a lock, so that every buffer is in a valid state in the child.
    """

    def __init__(self) -> None:
        self.held = threading.RLock()
        _locks.add(self)


_locks: weakref.WeakSet[BufferLock] = weakref.WeakSet()
_held_for_fork: list[BufferLock] = []
_forking = threading.Lock()


def _before_fork() -> None:
    _forking.acquire()  # one fork at a time: they share the list
    _held_for_fork[:] = list(_locks)
    for lock in _held_for_fork:
        lock.held.acquire()


def _after_fork_in_parent() -> None:
    while _held_for_fork:
        _held_for_fork.pop().held.release()
    _forking.release()


def _after_fork_in_child() -> None:
    global _forking
    while _held_for_fork:
        _held_for_fork.pop().held = threading.RLock()
    _forking = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
