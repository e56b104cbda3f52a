"""Call shards and wait for their results."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from sb3_extra_buffers.distributed.limits import LOG_WAIT_SECONDS
from sb3_extra_buffers.distributed.shard_transport import ShardDied, ShardTransport
from sb3_extra_buffers.errors import WorkerError

logger = logging.getLogger("sb3_extra_buffers")

_MAX_UNCONFIRMED = 64
"""How many calls of one shard may be unconfirmed: sent without waiting for the result."""


class ShardCalls(ABC):
    """The learner's side of calls to shards. It notices a dead shard when it waits for a result."""

    def __init__(self, transport: ShardTransport, n_shards: int) -> None:
        self._transport, self._n_shards = transport, n_shards
        self._restarts = [0] * n_shards
        """How many times each shard was restarted."""
        self._failures = [0] * n_shards
        """How many times each shard died since its last reply."""
        self._n_messages = [0] * n_shards
        """How many calls were sent to each shard. A call is identified by its number."""
        self._unconfirmed: list[deque[tuple[int, Any]]] = [deque() for _ in range(n_shards)]
        """Calls whose result is not needed, oldest first: the shard's restart count, and the handle."""
        self.is_closed = False

    @abstractmethod
    def _replace(self, shard: int, reason: str) -> None:
        """Replace a dead shard."""

    def _call(self, shard: int, method: str, *arguments: Any) -> Any:
        if self.is_closed:
            raise WorkerError("The buffer is closed, and its shards have ended. Create a new one.")
        self._n_messages[shard] += 1
        return self._transport.call(shard, method, *arguments)

    def _send(self, shard: int, method: str, *arguments: Any) -> None:
        """Call a method whose result is not needed."""
        self._unconfirmed[shard].append((self._restarts[shard], self._call(shard, method, *arguments)))

    def _wait_for_room(self, shard: int) -> None:
        """If too many calls of :meth:`_send` are unconfirmed, wait for the oldest."""
        waiting = self._unconfirmed[shard]
        while len(waiting) >= _MAX_UNCONFIRMED:
            restarts, handle = waiting.popleft()
            if restarts == self._restarts[shard]:
                self._result_or_none(shard, handle)

    def _result(self, shard: int, handle: Any) -> Any:
        """Wait for the result of a call. Logs a warning every few seconds."""
        began = time.monotonic()
        while True:
            try:
                result = self._transport.result(handle, LOG_WAIT_SECONDS)
            except TimeoutError:
                logger.warning("Waiting for shard %d for %.0f s", shard, time.monotonic() - began)
                continue
            self._failures[shard] = 0
            return result

    def _result_or_none(self, shard: int, handle: Any) -> Any:
        """The result, or ``None`` if the shard died and was replaced."""
        try:
            return self._result(shard, handle)
        except ShardDied as death:
            self._replace(shard, str(death))
            return None

    def ask_all(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        """Call a method of all shards, and return the results.

        :param arguments: For each argument, one value per shard.
        """
        handles = [self._call(shard, method, *(each[shard] for each in arguments)) for shard in range(self._n_shards)]
        results = []
        for shard, handle in enumerate(handles):
            try:
                results.append(self._result(shard, handle))
            except ShardDied as death:
                self._replace(shard, str(death))
                raise WorkerError(f"Shard {shard} died in {method}() and was restarted: {death}") from death
        return results

    def stop(self) -> None:
        """Stop all shards."""
        self.is_closed = True
        self._transport.stop()
