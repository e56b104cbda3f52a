"""Decoding the next batch while the model trains on this one."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch as th


class Prefetcher:
    """Keeps one batch ahead for each batch size, decoded by a thread of its own.

    What to sample is drawn by the caller, in the caller's thread, so that runs stay repeatable. They differ from runs
    without prefetching, since a batch is drawn one call earlier than it is used.
    """

    def __init__(self) -> None:
        self._start()
        _all_prefetchers.add(self)

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[Any]] = {}
        self._device: th.device | None = None

    def next(self, batch_size: int, device: th.device, draw: Callable[[], Any]) -> Any:
        """The batch drawn in the last call, and draw another one for the next. ``draw`` ends in :meth:`submit`.

        :param device: Where batches go. What was drawn for another device is forgotten.
        """
        if device != self._device:
            self.forget()
            self._device = device
        batch = self._ahead.pop(batch_size, None) or draw()
        self._ahead[batch_size] = draw()
        return batch.result()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While a transition is added. What was drawn before is read before, however late its thread wakes up."""
        self.wait()
        with self._lock:
            yield

    @contextmanager
    def invalidated(self) -> Iterator[None]:
        """While contents change in any other way. What was drawn before is forgotten."""
        with self.paused():
            self.forget()
            yield

    def submit(self, read: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Read in the background, while nothing is changed."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="sb3-extra-buffers-prefetch")
        return self._executor.submit(self._read, read, *arguments)

    def wait(self) -> None:
        """Until nothing is being read."""
        wait(self._ahead.values())

    def forget(self) -> None:
        """Throw away what was drawn: the buffer's contents are no longer what they were."""
        for batch in self._ahead.values():
            batch.cancel()
        self._ahead.clear()

    def close(self) -> None:
        """Forget everything and end the thread. The next batch starts another one."""
        self.forget()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()

    def _read(self, read: Callable[..., Any], *arguments: Any) -> Any:
        with self._lock:
            return read(*arguments)

    def __reduce__(self) -> tuple[type[Prefetcher], tuple[()]]:
        # Threads and locks cannot be pickled, and batches need not be: a loaded buffer starts anew.
        return Prefetcher, ()


_all_prefetchers: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


def _wait_before_fork() -> None:
    """So that the child does not get what a thread has half done, and does not have."""
    for prefetcher in list(_all_prefetchers):
        prefetcher.wait()


def _start_anew_in_child() -> None:
    """Threads do not survive a fork: what was drawn would never be read."""
    for prefetcher in list(_all_prefetchers):
        prefetcher._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_before_fork, after_in_child=_start_anew_in_child)
