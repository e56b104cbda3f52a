"""What arrives at the learner: segments go into the buffer, and their steps are counted one by one.

Requests are credits. A collector works only while it has one, and the learner grants a new one when steps that have
arrived were consumed. So the ratio of training to collecting is the one that was asked for, and neither the learner
nor the network holds more than a bounded number of segments.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.distributed.buffer import ShardedReplayBuffer
from sb3_extra_buffers.distributed.collector import CollectorPlan, Request, Weights
from sb3_extra_buffers.distributed.transport import Reply, Transport
from sb3_extra_buffers.errors import CorruptDataError, WorkerError

logger = logging.getLogger("sb3_extra_buffers")

_SAY_AFTER = 5.0
"""Seconds. A wait that takes longer says what it waits for."""
_MOST_FAILURES = 5
"""A collector that dies so often without one segment in between will not recover."""


class Step(NamedTuple):
    """One step of all environments of a collector, for callbacks and statistics."""

    rewards: npt.NDArray[np.float32]
    dones: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]


class Statistics:
    """What has happened so far."""

    def __init__(self, n_collectors: int) -> None:
        self.began = time.monotonic()
        """When the first segment arrived."""
        self.transitions = np.zeros(n_collectors, dtype=np.int64)
        """Of each collector."""
        self.n_bytes = 0
        self.n_segments = 0
        self.n_deaths = 0
        self.n_lost = 0
        """Segments that collectors were working on when they died, or that arrived damaged."""
        self.staleness = 0.0
        """How many versions of the weights the last segment was behind."""
        self.seconds_waited = 0.0
        self.seconds_publishing = 0.0

    def scalars(self) -> dict[str, float]:
        """For loggers."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        total = int(self.transitions.sum())
        return {
            "transitions_per_second": total / seconds,
            "slowest_transitions_per_second": float(self.transitions.min()) / seconds,
            "bytes_per_transition": self.n_bytes / max(total, 1),
            "bytes_per_second": self.n_bytes / seconds,
            "weights_behind": self.staleness,
            "restarts": self.n_deaths,
            "segments_lost": self.n_lost,
            "fraction_waiting": self.seconds_waited / seconds,
            "fraction_publishing": self.seconds_publishing / seconds,
        }


class Intake:
    """Asks collectors for segments and appends them to the buffer.

    :param ahead: The most requests that each collector has at a time.
    """

    def __init__(self, transport: Transport, buffer: ShardedReplayBuffer, seed: int | None, ahead: int = 2) -> None:
        self.transport, self.buffer = transport, buffer
        self._seed, self._ahead = seed, ahead
        n = len(buffer.parts)
        self.statistics = Statistics(n)
        self.version = 0
        self._weights: Any = None
        self._sent_versions = [-1] * n
        """The weights that each collector was last sent."""
        self._credits = [ahead] * n
        self._starts = [0] * n
        self._failures = [0] * n
        self._steps: deque[Step | int] = deque()
        """Steps that arrived, and after the last one of a segment, the collector that gets a new credit."""

    @property
    def n_waiting(self) -> int:
        """Steps that have arrived and were not consumed yet."""
        return sum(isinstance(step, Step) for step in self._steps)

    def start(self, plan: CollectorPlan, weights: Weights) -> None:
        self.transport.start(plan, [self._next_seed(index) for index in range(len(self._starts))])
        self.publish(weights)

    def publish(self, weights: Weights) -> None:
        """New weights, which collectors get with their next request."""
        began = time.monotonic()
        self._weights = self.transport.publish(weights)
        self.version += 1
        self.statistics.seconds_publishing += time.monotonic() - began

    def next_step(self, num_timesteps: int, total_timesteps: int) -> Step:
        """The next step. Waits until one has arrived."""
        request = Request(num_timesteps, total_timesteps, self.version)
        self._spend_credits(request)
        began = said = time.monotonic()
        while True:
            for reply in self.transport.replies(0.0 if self._has_steps() else 1.0):
                self._take(reply)
            self._spend_credits(request)
            if self._has_steps():
                break
            now = time.monotonic()
            if now - said > _SAY_AFTER:
                logger.warning(
                    "Waiting for a segment of any of %d collectors since %.0f s", len(self._starts), now - began
                )
                said = now
        self.statistics.seconds_waited += time.monotonic() - began
        while isinstance(self._steps[0], int):
            self._credits[self._steps.popleft()] += 1  # type: ignore[index]  # just checked
        step = self._steps.popleft()
        assert isinstance(step, Step)
        return step

    def _has_steps(self) -> bool:
        return any(isinstance(step, Step) for step in self._steps)

    def _spend_credits(self, request: Request) -> None:
        for collector, credits in enumerate(self._credits):
            for _ in range(credits):
                is_new = self._sent_versions[collector] < self.version
                self.transport.submit(collector, request, self._weights if is_new else None)
                self._sent_versions[collector] = self.version
            self._credits[collector] = 0

    def _take(self, reply: Reply) -> None:
        collector, statistics = reply.collector, self.statistics
        part = self.buffer.parts[collector]
        if reply.segment is None:
            self._replace(collector, reply.reason)
            return
        first = part.pos
        try:
            info = part.ingest_segment(reply.segment)
        except CorruptDataError as error:
            self._replace(collector, str(error))
            return
        self._failures[collector] = 0
        if statistics.n_segments == 0:
            statistics.began = time.monotonic()  # starting processes does not count
        statistics.transitions[collector] += info.n_transitions
        statistics.n_bytes += len(reply.segment)
        statistics.n_segments += 1
        statistics.staleness = self.version - (info.policy_version or 0)
        slots = (first + np.arange(info.n_steps)) % part.buffer_size
        infos: list[list[dict[str, Any]]] = [[{} for _ in range(part.n_envs)] for _ in slots]
        for step, env, episode, success in info.extra.get("episodes", []):
            infos[step][env] |= {} if episode is None else {"episode": episode}
            infos[step][env] |= {} if success is None else {"is_success": success}
        rewards, dones = (part._field_rows(name, slots) for name in ("rewards", "dones"))
        for step, step_infos in enumerate(infos):
            self._steps.append(Step(rewards[step], dones[step] > 0, step_infos))
        self._steps.append(collector)

    def _replace(self, collector: int, reason: str) -> None:
        """Start a collector again. Its new steps begin new episodes in the buffer."""
        self.statistics.n_deaths += 1
        self.statistics.n_lost += 1
        self._failures[collector] += 1
        if self._failures[collector] >= _MOST_FAILURES:
            raise WorkerError(
                f"Collector {collector} died {_MOST_FAILURES} times without one segment in between. The last time: "
                f"{reason}"
            )
        logger.warning("Collector %d died and is started again: %s", collector, reason)
        self.transport.restart(collector, self._next_seed(collector))
        self._sent_versions[collector] = -1
        self._credits[collector] = self._ahead - sum(waiting == collector for waiting in self._steps)

    def _next_seed(self, collector: int) -> int | None:
        """Every collector has a seed of its own, and another one each time it is started."""
        self._starts[collector] += 1
        if self._seed is None:
            return None
        return (self._seed + 1009 * (collector + 1) + 100_003 * self._starts[collector]) % (1 << 31)

    def stop(self) -> None:
        self.transport.stop()
