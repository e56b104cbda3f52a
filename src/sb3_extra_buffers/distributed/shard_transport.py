"""How the learner reaches its shards: the interface, and the form of it that needs no other process."""

from __future__ import annotations

import pickle
import traceback
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, NamedTuple

from sb3_extra_buffers.distributed.shard import Drawn, Shard, ShardPlan
from sb3_extra_buffers.errors import ExtraBuffersError, WorkerError
from sb3_extra_buffers.storage.outputs import Lease


class ShardDied(Exception):  # noqa: N818  # what has happened, not what was wrong
    """The shard that was called is gone, with its reason."""


class Call:
    """A call of a shard for several batches."""

    def __init__(self, shard: int, life: int, total: float) -> None:
        self.shard, self.life = shard, life
        self.total = total
        """The sum of priorities that was known then."""
        self.asked: list[Any] = []
        """What the shard is asked for, for each batch."""
        self.handle: Any = None
        self.message = 0
        self.replies: list[Drawn | None] | None = None


class Request(NamedTuple):
    """A batch that was requested."""

    n: int
    memory: Lease
    """Where its observations belong."""
    pieces: list[tuple[Call, int]]
    """The calls for its rows, in their order, and where its rows are in the replies."""


class ShardTransport(ABC):
    """Calls methods of shards. A shard answers its calls one after the other."""

    @abstractmethod
    def start(self, plans: list[ShardPlan]) -> None:
        """Create a shard for each plan."""

    @abstractmethod
    def call(self, shard: int, method: str, *arguments: Any) -> Any:
        """Call a method of a shard, and return a handle for :meth:`result`. Nobody needs to ask for the result."""

    @abstractmethod
    def result(self, handle: Any, timeout: float) -> Any:
        """What a call has returned. Its errors are raised here.

        :raises ShardDied: if the shard died before it could answer.
        :raises TimeoutError: if it has not answered in time.
        """

    @abstractmethod
    def restart(self, shard: int) -> None:
        """Replace a shard that died."""

    @abstractmethod
    def stop(self) -> None:
        """End all shards."""


def pack_call(method: str, arguments: tuple[Any, ...]) -> bytes:
    """A call as a message."""
    return pickle.dumps((method, arguments), protocol=5)


def answer_call(shard: Shard, message: bytes) -> bytes:
    """Do what a message asks for. The reply has the result or the error."""
    method, arguments = pickle.loads(message)  # of the learner that has made this shard
    error: ExtraBuffersError | None = None
    result: Any = None
    try:
        result = getattr(shard, method)(*arguments)
    except ExtraBuffersError as raised:
        error = raised
    except Exception:
        error = WorkerError(f"A shard raised an error: {traceback.format_exc()}")
    return pickle.dumps((result, error), protocol=5)


def result_of(reply: bytes) -> Any:
    """What a call has returned. Its errors are raised."""
    result, error = pickle.loads(reply)  # of the shard that this learner has started
    if error is not None:
        raise error
    return result


class _LocalCall:
    """A call that waits, and then its result."""

    def __init__(self, method: str, arguments: tuple[Any, ...]) -> None:
        self.method, self.arguments = method, arguments
        self.is_done = False
        self.result: Any = None
        self.error: Exception | None = None


class LocalShards(ShardTransport):
    """Shards in this process. They work while the learner waits for a result."""

    def __init__(self) -> None:
        self.shards: list[Shard | None] = []
        self._plans: list[ShardPlan] = []
        self._waiting: list[deque[_LocalCall]] = []

    def start(self, plans: list[ShardPlan]) -> None:
        self._plans = plans
        self.shards = [Shard(plan) for plan in plans]
        self._waiting = [deque() for _ in plans]

    def call(self, shard: int, method: str, *arguments: Any) -> tuple[int, _LocalCall]:
        call = _LocalCall(method, arguments)
        self._waiting[shard].append(call)
        return shard, call

    def result(self, handle: tuple[int, _LocalCall], timeout: float) -> Any:
        number, call = handle
        while not call.is_done:
            if not self._waiting[number]:
                raise ShardDied("it was killed")
            self._work(number)
        if call.error is not None:
            raise call.error
        return call.result

    def _work(self, number: int) -> None:
        call, shard = self._waiting[number].popleft(), self.shards[number]
        call.is_done = True
        try:
            if shard is None:
                raise ShardDied("it was killed")
            call.result = getattr(shard, call.method)(*call.arguments)
        except Exception as error:
            call.error = error

    def kill(self, shard: int) -> None:
        """As if the process had died: for tests."""
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
