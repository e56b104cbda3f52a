"""The learner's intake: request segments from collectors, append them to the buffer, and count their steps.

Flow control uses credits. A collector only works on requests, and the learner sends a new request when it has consumed
the steps of an earlier segment. So the ratio of training to collecting is as configured, and the queue of segments is
bounded. If the learner is slower than the collectors, it requests fewer segments at a time. Then collectors wait before
they collect, instead of filling the queue with steps of outdated weights.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.distributed.collector import CollectorPlan, Request, Weights
from sb3_extra_buffers.distributed.limits import LOG_WAIT_SECONDS, MAX_FAILURES
from sb3_extra_buffers.distributed.transport import Reply, Transport
from sb3_extra_buffers.errors import CorruptDataError, WorkerError

logger = logging.getLogger("sb3_extra_buffers")

_INITIAL_LIMIT, _MIN_LIMIT = 8.0, 2.0
"""The first and the lowest value of :attr:`Intake._limit`."""


class Step(NamedTuple):
    """One step of all environments of a collector, for callbacks and statistics."""

    rewards: npt.NDArray[np.float32]
    dones: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]


def joined(steps: Sequence[Step]) -> Step:
    """Concatenate a step of several collectors into a step of all their environments."""
    rewards, dones, infos = zip(*steps, strict=True)
    return Step(np.concatenate(rewards), np.concatenate(dones), list(itertools.chain(*infos)))


class Statistics:
    """Counters of collectors and their segments."""

    def __init__(self, n_collectors: int) -> None:
        self.began = time.monotonic()
        """When the first segment arrived."""
        self.transitions = np.zeros(n_collectors, dtype=np.int64)
        """Transitions received from each collector."""
        self.n_bytes = 0
        self.n_segments = 0
        self.n_deaths = 0
        self.n_lost = 0
        """Segments that were lost because their collector died or they arrived damaged."""
        self.staleness = 0.0
        """How many versions older than the newest the weights of the last segment were."""
        self.seconds_waited = 0.0
        self.seconds_publishing = 0.0

    def scalars(self) -> dict[str, float]:
        """Rates and counts for loggers."""
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
    """Requests segments from collectors and appends them to the buffer.

    :param buffer: A buffer with one part for each collector.
    :param ahead: Maximum number of open requests per collector.
    :param starts: How many times each collector was started before. This list is updated.
    """

    def __init__(self, transport: Transport, buffer: Any, seed: int | None, ahead: int, starts: list[int]) -> None:
        self.transport, self.buffer = transport, buffer
        self._seed, self._ahead = seed, ahead
        n = len(buffer.parts)
        self.statistics = Statistics(n)
        self.version = 0
        self._weights: Any = None
        self._sent_versions = [-1] * n
        """The version of the weights that each collector has."""
        self._credits = deque([*range(n)] * ahead)
        """Collectors to which a request may be sent. Each entry is a credit for one request."""
        self._requested = [0] * n
        """Open requests of each collector."""
        self._limit = min(n * ahead, _INITIAL_LIMIT)
        """Maximum number of segments that are requested or not consumed yet. It adapts to the speed of the learner."""
        self._starts = starts
        self._failures = [0] * n
        self._n_consumed = 0
        self._poll_every = max(1, n // 8)
        self._segments: deque[tuple[int, deque[Step]]] = deque()
        """Received segments: the collector, and the steps not consumed yet. When none is left, it gets a new credit."""

    @property
    def n_waiting(self) -> int:
        """Steps that were received but not consumed yet."""
        return sum(len(steps) for _, steps in self._segments)

    def start(self, plan: CollectorPlan) -> None:
        """Start all collectors. Call :meth:`publish` next."""
        self._n_envs = plan.n_envs
        self.transport.start(plan, [self._next_seed(index) for index in range(len(self._starts))])

    def publish(self, weights: Weights) -> None:
        """Send new weights to each collector with its next request."""
        began = time.monotonic()
        self._weights = self.transport.publish(weights)
        self.version += 1
        self.statistics.seconds_publishing += time.monotonic() - began

    def next_step(self, num_timesteps: int, total_timesteps: int) -> Step:
        """Wait for a step of any collector, and consume it."""
        self._n_consumed += 1
        if not self._has_steps():
            self._limit = min(1.5 * self._limit, self._ahead * len(self._starts))
            self._wait(num_timesteps, total_timesteps, self._has_steps)
        # Look for new segments only every few steps: polling 2,000 requests in Ray takes half a millisecond.
        elif self._n_consumed % self._poll_every == 0:
            self._wait(num_timesteps, total_timesteps, self._has_steps)
        while not self._segments[0][1]:
            self._credits.append(self._segments.popleft()[0])
            # The limit rises fast and falls slowly. benchmarks.studies.many_collectors shows how this affects waiting
            # times and the age of weights.
            if len(self._segments) > 1 + self._limit / 2:
                self._limit = max(self._limit - 0.2, _MIN_LIMIT)
        return self._segments[0][1].popleft()

    def _has_steps(self) -> bool:
        return any(steps for _, steps in self._segments)

    def next_rollout(self, num_timesteps: int, total_timesteps: int) -> list[deque[Step]]:
        """Wait for one segment of each collector, and consume their steps.

        If a collector dies, its replacement collects its part again, with the same weights.
        """
        self._limit = len(self._starts)
        self._wait(num_timesteps, total_timesteps, lambda: len(self._segments) == len(self._starts))
        rollout = dict(self._segments)
        self._segments.clear()
        self._credits.extend(range(len(rollout)))
        return [rollout[collector] for collector in range(len(rollout))]

    def _wait(self, num_timesteps: int, total_timesteps: int, is_done: Callable[[], bool]) -> None:
        request = Request(num_timesteps, total_timesteps, self.version)
        self._spend_credits(request)
        began = logged = time.monotonic()
        while True:
            for reply in self.transport.replies(0.0 if is_done() else 1.0):
                self._ingest(reply)
            self._spend_credits(request)
            if is_done():
                break
            now = time.monotonic()
            if now - logged > LOG_WAIT_SECONDS:
                missing = sorted(set(range(len(self._starts))).difference(collector for collector, _ in self._segments))
                logger.warning("Waiting for segments of collectors %s for %.0f s", missing, now - began)
                logged = now
        self.statistics.seconds_waited += time.monotonic() - began

    def _spend_credits(self, request: Request) -> None:
        if not self._credits:
            return
        n_free = int(self._limit) - sum(self._requested) - len(self._segments)
        for _ in range(min(n_free, len(self._credits))):
            collector = self._credits.popleft()
            is_new = self._sent_versions[collector] < self.version
            self.transport.submit(collector, request, self._weights if is_new else None)
            self._sent_versions[collector] = self.version
            self._requested[collector] += 1

    def _ingest(self, reply: Reply) -> None:
        collector, statistics = reply.collector, self.statistics
        if not self._requested[collector]:
            return  # from a collector that was replaced after an earlier one of these replies
        self._requested[collector] -= 1
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
            statistics.began = time.monotonic()  # leaves out the time in which processes start
        statistics.transitions[collector] += info.n_transitions
        statistics.n_bytes += len(reply.segment)
        statistics.n_segments += 1
        statistics.staleness = self.version - (info.policy_version or 0)
        slots = (first + np.arange(info.n_steps)) % part.buffer_size
        infos: list[list[dict[str, Any]]] = [[{} for _ in range(part.n_envs)] for _ in slots]
        rewards = part._field_rows("rewards", slots)
        dones = np.zeros((info.n_steps, part.n_envs), np.bool_)
        for step, env, reward, episode, success in info.extra.get("episodes", []):
            rewards[step, env], dones[step, env] = reward, True
            infos[step][env] |= {} if episode is None else {"episode": episode}
            infos[step][env] |= {} if success is None else {"is_success": success}
        self._segments.append((collector, deque(map(Step, rewards, dones, infos))))

    def _replace(self, collector: int, reason: str) -> None:
        """Restart a dead collector. Its first segment begins new episodes in the buffer."""
        self.statistics.n_deaths += 1
        self.statistics.n_lost += 1
        self._failures[collector] += 1
        if self._failures[collector] >= MAX_FAILURES:
            raise WorkerError(
                f"Collector {collector} died {MAX_FAILURES} times without a segment in between. The last reason: "
                f"{reason}"
            )
        logger.warning("Collector %d died and is restarted: %s", collector, reason)
        self.transport.restart(collector, self._next_seed(collector))
        self._sent_versions[collector] = -1
        self._requested[collector] = 0
        n_waiting = sum(waiting == collector for waiting, _ in self._segments)
        credits = [waiting for waiting in self._credits if waiting != collector]
        # It gets the next requests, because a rollout waits for it.
        self._credits = deque([*[collector] * (self._ahead - n_waiting), *credits])

    def _next_seed(self, collector: int) -> int | None:
        """A seed with which all environments have the same seeds as in one large ``VecEnv`` of SB3.

        A restarted collector gets another seed, so that it does not repeat earlier steps.
        """
        n_starts = self._starts[collector]
        self._starts[collector] += 1
        if self._seed is None:
            return None
        return (self._seed + self._n_envs * collector + 100_003 * n_starts) % (1 << 31)
