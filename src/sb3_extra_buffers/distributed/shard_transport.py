"""The interface between learner and shards, and its implementation in a single process."""

from __future__ import annotations

import pickle
import traceback
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sb3_extra_buffers.distributed.shard import Drawn, Shard, ShardPlan
from sb3_extra_buffers.errors import ExtraBuffersError, WorkerError
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.storage.outputs import Lease


class ShardDied(Exception):  # noqa: N818  # an event, not a mistake
    """A shard died before it answered a call. The message is the reason."""


@dataclass
class Call:
    """A call that asks one shard for its share of several batches."""

    shard: int
    restarts: int
    """The shard's restart count at the time of the call."""
    total: float
    """The shard's sum of priorities, as known at the time of the call."""
    asked: list[Any] = field(default_factory=list)
    """One entry for each batch: what :meth:`.Shard.draw` needs."""
    handle: Any = None
    message: int = 0
    """The number of the message to this shard."""
    replies: list[Drawn | None] | None = None
    """One reply for each batch, once they have arrived."""


class Request(NamedTuple):
    """A requested batch."""

    n: int
    memory: Lease
    """The memory for its observations."""
    pieces: list[tuple[Call, int]]
    """The calls for its rows, in order, each with the position of this batch in the call."""


class ShardTransport(ABC):
    """Calls methods of shards. A shard answers its calls in order."""

    @abstractmethod
    def start(self, plans: list[ShardPlan]) -> None:
        """Create a shard for each plan."""

    @abstractmethod
    def call(self, shard: int, method: str, *arguments: Any) -> Any:
        """Call a method of a shard. Returns a handle for :meth:`result`, which may be ignored."""

    @abstractmethod
    def result(self, handle: Any, timeout: float) -> Any:
        """Wait for the result of a call. Raises the error if the method raised one.

        :raises ShardDied: if the shard died before it answered.
        :raises TimeoutError: if it has not answered after ``timeout`` seconds.
        """

    @abstractmethod
    def restart(self, shard: int) -> None:
        """Replace a dead shard."""

    @abstractmethod
    def stop(self) -> None:
        """End all shards."""


def pack_call(method: str, arguments: tuple[Any, ...]) -> bytes:
    """Pickle a call for :func:`answer_call`."""
    return pickle.dumps((method, arguments), protocol=5)


def answer_call(shard: Shard, message: bytes) -> bytes:
    """Carry out a pickled call. Returns the pickled result or error, for :func:`result_of`."""
    method, arguments = pickle.loads(message)  # trusted: from the learner that started this shard
    reply: tuple[Any, ExtraBuffersError | None]
    try:
        reply = getattr(shard, method)(*arguments), None
    except ExtraBuffersError as error:
        reply = None, error
    except Exception:
        reply = None, WorkerError(f"A shard raised an error: {traceback.format_exc()}")
    return pickle.dumps(reply, protocol=5)


def result_of(reply: bytes) -> Any:
    """The result in a reply. Raises the error if the method raised one."""
    result, error = pickle.loads(reply)  # trusted: from a shard that this learner started
    if error is not None:
        raise error
    return result


class LocalShards(ShardTransport):
    """Shards in this process. They run while the learner waits for a result."""

    def __init__(self) -> None:
        self.shards: list[Shard | None] = []
        self._plans: list[ShardPlan] = []
        self._waiting: list[deque[tuple[Future[Any], str, tuple[Any, ...]]]] = []

    def start(self, plans: list[ShardPlan]) -> None:
        self._plans = plans
        self.shards = [Shard(plan) for plan in plans]
        self._waiting = [deque() for _ in plans]

    def call(self, shard: int, method: str, *arguments: Any) -> tuple[int, Future[Any]]:
        future: Future[Any] = Future()
        self._waiting[shard].append((future, method, arguments))
        return shard, future

    def result(self, handle: tuple[int, Future[Any]], timeout: float) -> Any:
        number, future = handle
        while not future.done():
            if not self._waiting[number]:
                raise ShardDied("it was killed")
            with uninterrupted():  # a shard in a process of its own would not notice Ctrl-C either
                self._work(number)
        return future.result()

    def _work(self, number: int) -> None:
        (future, method, arguments), shard = self._waiting[number].popleft(), self.shards[number]
        try:
            if shard is None:
                raise ShardDied("it was killed")
            future.set_result(getattr(shard, method)(*arguments))
        except Exception as error:
            future.set_exception(error)
        finally:
            if not future.done():
                future.set_result(None)  # after Ctrl-C: the learner treats None as a lost reply, and asks again

    def kill(self, shard: int) -> None:
        """Let a shard die as if its process had been killed, for tests."""
        found = self.shards[shard]
        if found is not None:
            for part in found._buffers:
                if part._folder is not None:
                    part._folder.close()  # without a flush
        self.shards[shard] = None

    def restart(self, shard: int) -> None:
        self._waiting[shard].clear()
        self.shards[shard] = Shard(self._plans[shard])

    def stop(self) -> None:
        for shard in self.shards:
            if shard is not None:
                shard.close()
        self.shards, self._waiting = [], []
