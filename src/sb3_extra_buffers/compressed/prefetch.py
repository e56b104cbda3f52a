"""Decoding the next batch while the model trains on this one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any


class Prefetcher:
    """Keeps one batch ahead for each batch size, decoded by a thread of its own.

    What to sample is drawn by the caller, in the caller's thread, so that runs stay repeatable. They differ from runs
    without prefetching, since a batch is drawn one call earlier than it is used.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sb3-extra-buffers-prefetch")
        self._ahead: dict[int, Future[Any]] = {}

    def next(self, batch_size: int, draw: Callable[[], Any]) -> Any:
        """The batch drawn in the last call, and draw another one for the next. ``draw`` ends in :meth:`submit`."""
        batch = self._ahead.pop(batch_size, None) or draw()
        self._ahead[batch_size] = draw()
        return batch.result()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While the buffer changes. What was drawn before is read before, however late its thread wakes up."""
        wait(self._ahead.values())
        with self._lock:
            yield

    def submit(self, read: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Read in the background, while nothing is changed."""
        return self._executor.submit(self._read, read, *arguments)

    def forget(self) -> None:
        """Throw away what was drawn: the buffer's contents are no longer what they were."""
        for batch in self._ahead.values():
            batch.cancel()
        self._ahead.clear()

    def _read(self, read: Callable[..., Any], *arguments: Any) -> Any:
        with self._lock:
            return read(*arguments)

    def __reduce__(self) -> tuple[type[Prefetcher], tuple[()]]:
        # Threads and locks cannot be pickled, and batches need not be: a loaded buffer starts anew.
        return Prefetcher, ()
