"""Calls of shards, and waiting for their results."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from sb3_extra_buffers.distributed.shard_transport import ShardDied, ShardTransport
from sb3_extra_buffers.errors import WorkerError

logger = logging.getLogger("sb3_extra_buffers")

_SAY_AFTER = 5.0
"""Seconds. A wait that takes longer says what it waits for."""
_MOST_WAITING = 64
"""Messages to a shard that has not confirmed them yet."""


class ShardCalls(ABC):
    """The learner's end of the calls. A shard that died is noticed when a result is waited for."""

    def __init__(self, transport: ShardTransport, n_shards: int) -> None:
        self._transport, self._n_shards = transport, n_shards
        self._lives = [0] * n_shards
        """How often each shard was started again."""
        self._failures = [0] * n_shards
        """How often it died since it last replied."""
        self._n_messages = [0] * n_shards
        self._unconfirmed: list[deque[tuple[int, Any]]] = [deque() for _ in range(n_shards)]
        """Calls whose results nobody needs, each with the life of its shard."""
        self.is_closed = False

    @abstractmethod
    def _lose(self, shard: int, reason: str) -> None:
        """Replace a shard that died."""

    def _call(self, shard: int, method: str, *arguments: Any) -> Any:
        if self.is_closed:
            raise WorkerError("The buffer was closed, and its shards have ended.")
        self._n_messages[shard] += 1
        return self._transport.call(shard, method, *arguments)

    def _send(self, shard: int, method: str, *arguments: Any) -> None:
        """A call whose result nobody needs."""
        self._unconfirmed[shard].append((self._lives[shard], self._call(shard, method, *arguments)))

    def _wait_for_room(self, shard: int) -> None:
        """If too many calls are on the way whose results nobody needs, wait for the oldest."""
        waiting = self._unconfirmed[shard]
        while len(waiting) >= _MOST_WAITING:
            life, handle = waiting.popleft()
            if life == self._lives[shard]:
                self._try(shard, handle)

    def _result(self, shard: int, handle: Any) -> Any:
        began = time.monotonic()
        while True:
            try:
                result = self._transport.result(handle, _SAY_AFTER)
            except TimeoutError:
                logger.warning("Waiting for shard %d since %.0f s", shard, time.monotonic() - began)
                continue
            self._failures[shard] = 0
            return result

    def _try(self, shard: int, handle: Any) -> Any:
        """The result, or ``None`` if the shard died, which is replaced then."""
        try:
            return self._result(shard, handle)
        except ShardDied as death:
            self._lose(shard, str(death))
            return None

    def ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all shards, and wait for the results."""
        handles = [self._call(shard, method, *arguments) for shard in range(self._n_shards)]
        return [self._finished(shard, handle, method) for shard, handle in enumerate(handles)]

    def _finished(self, shard: int, handle: Any, method: str) -> Any:
        try:
            return self._result(shard, handle)
        except ShardDied as death:
            self._lose(shard, str(death))
            raise WorkerError(f"Shard {shard} died during {method}(), and was started again: {death}") from death

    def stop(self) -> None:
        """End all shards."""
        self.is_closed = True
        self._transport.stop()
