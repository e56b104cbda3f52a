"""Decode the next batch while the model trains on this one."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch as th


class Prefetcher:
    """Keeps one batch ahead for each batch size, decoded by a background thread.

    The caller draws the indices, in its own thread, so that runs stay repeatable. They differ from runs without
    prefetching, since a batch is drawn one call earlier than it is used.
    """

    def __init__(self) -> None:
        self._start()
        _all_prefetchers.add(self)

    def _start(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[Any]] = {}
        self._device: th.device | None = None

    def next(self, batch_size: int, device: th.device, draw: Callable[[], Any]) -> Any:
        """Return the batch that the last call drew, and draw one for the next call. ``draw`` ends in :meth:`submit`.

        :param device: Where batches go. Batches that were drawn for another device are dropped.
        """
        if device != self._device:
            self.forget()
            self._device = device
        batch = self._ahead.pop(batch_size, None) or draw()
        self._ahead[batch_size] = draw()
        return batch.result()

    @contextmanager
    def invalidated(self) -> Iterator[None]:
        """While contents change other than by adding. Batches that were drawn before are dropped."""
        self.wait()
        self.forget()
        yield

    def submit(self, read: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Read in the background."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="sb3-extra-buffers-prefetch")
        return self._executor.submit(read, *arguments)

    def wait(self) -> None:
        """Wait until nothing is being read."""
        wait(self._ahead.values())

    def forget(self) -> None:
        """Drop all batches that were drawn, because the contents of the buffer have changed."""
        for batch in self._ahead.values():
            batch.cancel()
        self._ahead.clear()

    def close(self) -> None:
        """Drop all batches and end the thread. The next batch starts another one."""
        self.forget()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()


_all_prefetchers: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


def _wait_before_fork() -> None:
    """The child has no copy of the thread, so it must not get a batch that is half read."""
    for prefetcher in list(_all_prefetchers):
        prefetcher.wait()


def _start_anew_in_child() -> None:
    """Threads do not survive a fork: batches would never be read."""
    for prefetcher in list(_all_prefetchers):
        prefetcher._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_before_fork, after_in_child=_start_anew_in_child)
