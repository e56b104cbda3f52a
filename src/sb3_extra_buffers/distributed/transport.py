"""The interface between learner and collectors, and its implementation in a single process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.distributed.collector import Collector, CollectorPlan, Request, Weights


class Reply(NamedTuple):
    """The answer to a request. ``segment`` is ``None`` if the collector died; then ``reason`` says why."""

    collector: int
    segment: npt.NDArray[np.uint8] | None
    reason: str = ""


class Transport(ABC):
    """Sends requests to collectors and receives segments. A collector answers its requests in order."""

    @abstractmethod
    def start(self, plan: CollectorPlan, seeds: list[int | None]) -> None:
        """Create one collector for each seed."""

    @abstractmethod
    def publish(self, weights: Weights) -> Any:
        """Make weights available to all collectors. Returns a handle for :meth:`submit`."""

    @abstractmethod
    def submit(self, collector: int, request: Request, weights: Any) -> None:
        """Request a segment from a collector.

        :param weights: A handle of :meth:`publish`, or ``None`` if the collector has the newest weights.
        """

    @abstractmethod
    def replies(self, timeout: float) -> list[Reply]:
        """All replies that have arrived. If there are none, wait up to ``timeout`` seconds for one."""

    @abstractmethod
    def restart(self, collector: int, seed: int | None) -> None:
        """Replace a dead collector. Its unanswered requests are lost."""

    @abstractmethod
    def stop(self) -> None:
        """End all collectors."""


class LocalTransport(Transport):
    """Collectors in this process. They run while the learner waits for replies."""

    def __init__(self) -> None:
        self.collectors: list[Collector] = []
        self._requests: deque[tuple[int, Request, Weights | None]] = deque()

    def start(self, plan: CollectorPlan, seeds: list[int | None]) -> None:
        self._plan = plan
        for index, seed in enumerate(seeds):  # one by one, so that stop() ends them if a later one cannot be created
            self.collectors.append(Collector(plan, index, seed))

    def publish(self, weights: Weights) -> Weights:
        return {name: value.copy() for name, value in weights.items()}

    def submit(self, collector: int, request: Request, weights: Any) -> None:
        self._requests.append((collector, request, weights))

    def replies(self, timeout: float) -> list[Reply]:
        if not self._requests:
            return []
        number, request, weights = self._requests.popleft()
        return [Reply(number, self.collectors[number].collect(request, weights))]

    def restart(self, collector: int, seed: int | None) -> None:
        self._requests = deque(request for request in self._requests if request[0] != collector)
        self.collectors[collector].close()
        self.collectors[collector] = Collector(self._plan, collector, seed)

    def stop(self) -> None:
        for collector in self.collectors:
            collector.close()
        self.collectors, self._requests = [], deque()
