"""How many collectors can one learner have? A simulation, up to 1,000, whose parameters are measured here.

    python -m benchmarks.studies.many_collectors

Measured: bytes of a transition on the wire, the time to ingest a segment, the time to publish weights, the time that
Ray takes for a call and for polling all calls, the speed of a collector, and the time of a gradient step.

Assumed: the learner's network has 10 Gb/s in each direction, and a message takes 0.2 ms. There are 16 collectors on a
machine, each on a CPU as fast as ours. New weights go to every machine once, all from the learner. The time for a
segment varies by a fifth (log-normal). Collectors use the default options. Nothing fails.

Three learners: SB3's DQN with its default ratio of training to collecting, on this CPU; one with the ratio and speed of
Ape-X (batches of 512, 19 per second, https://arxiv.org/abs/1803.00933); and one that only ingests.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.recordings import load_recording
from benchmarks.report import markdown_table
from benchmarks.studies.segments import N_ENVS, send
from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.distributed.collector import Collector, CollectorPlan, Request, weights_of
from sb3_extra_buffers.training_utils.atari import make_env

GAME = "MsPacmanNoFrameskip-v4"
SEGMENT_STEPS, AHEAD, SYNC_EVERY = 32, 2, 100
SEGMENT = SEGMENT_STEPS * N_ENVS
BANDWIDTH, LATENCY, PER_MACHINE, SPREAD = 1.25e9, 2e-4, 16, 0.2
HEADINGS = (
    "collectors",
    "transitions/s",
    "MB/s in",
    "MB/s of weights out",
    "time ingesting",
    "time publishing",
    "time waiting",
    "gradient steps behind",
)
COUNTS = (1, 10, 100, 300, 1_000)


@dataclass
class Measured:
    """What was measured, in seconds unless stated otherwise."""

    bytes_per_transition: float
    ingest: float
    """To ingest a segment."""
    weights: int
    """Bytes of all weights."""
    publish: float
    call: float
    """To submit a request and to get its result, at the learner."""
    poll: float
    """To ask Ray which of 2,000 requests are done."""
    collect: float
    """To collect a segment, at the collector."""
    gradient: float
    """A gradient step with a batch of 32, on this CPU."""


def fastest(function: Callable[[], Any], repeats: int) -> float:
    """The 10th percentile of the times, because the machine may be busy."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return float(np.percentile(times, 10))


def measure() -> Measured:
    from stable_baselines3 import DQN

    on_the_wire, rate, _ = send(load_recording("mspacman", 3_000), 3_000, SEGMENT_STEPS)
    arguments = {
        "policy": "CnnPolicy",
        "buffer_size": 2 * SEGMENT,
        "replay_buffer_class": CompressedReplayBuffer,
        "learning_starts": 0,
    }
    plan = CollectorPlan(DQN, arguments, [{}], partial(make_env, GAME, N_ENVS, seed=0), N_ENVS, SEGMENT_STEPS)
    collector = Collector(plan, 0, 0)
    request = Request(1_000, 1_000_000, 1)
    collect = fastest(lambda: collector.collect(request, None), 6)
    model: Any = collector.model
    gradient = fastest(lambda: model.train(1, 32), 20)
    weights = weights_of(model)
    collector.close()
    call, poll, publish = measure_ray(weights, round(on_the_wire * SEGMENT))
    n_bytes = sum(value.nbytes for value in weights.values())
    return Measured(on_the_wire, SEGMENT / rate, n_bytes, publish, call, poll, collect, gradient)


def measure_ray(weights: Any, n_bytes: int) -> tuple[float, float, float]:
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=40)

    @ray.remote(num_cpus=0)
    class Sender:
        def send(self, seconds: float) -> Any:
            time.sleep(seconds)
            return np.zeros(n_bytes, np.uint8)

    actor: Any = Sender.remote()  # type: ignore[attr-defined]  # of Ray
    ray.get(actor.send.remote(0.0))
    began = time.perf_counter()
    calls = [actor.send.remote(0.0) for _ in range(300)]
    submitted = time.perf_counter() - began
    ray.wait(calls, num_returns=len(calls))
    began = time.perf_counter()
    for each in calls:
        ray.get(each)
    call = (submitted + time.perf_counter() - began) / len(calls)
    publish = fastest(lambda: ray.put(weights), 10)
    actor.send.remote(60.0)
    calls = [actor.send.remote(0.0) for _ in range(2_000)]
    poll = fastest(lambda: ray.wait(calls, num_returns=len(calls), timeout=0), 20)
    ray.shutdown()
    return call, poll, publish


class Simulation:
    """A learner and ``n`` collectors. Its clock is the learner's."""

    def __init__(self, measured: Measured, n: int, gradient: float, transitions: float) -> None:
        self.measured, self.n = measured, n
        self.gradient, self.transitions = gradient, transitions
        """The seconds of a gradient step, and the transitions that are consumed for each."""
        self.rng = np.random.default_rng(0)
        self.now = self.waited = self.took_in = self.published = 0.0
        self.updates = self.n_segments = self.bytes_out = 0
        self.in_free = self.out_free = 0.0
        self.free = [0.0] * n
        self.sent_version = [-1] * (n // PER_MACHINE + 1)
        self.version_at = [0]
        """The number of gradient steps at each version of the weights."""
        self.done: list[tuple[float, int, int]] = []
        """A heap of segments: when each leaves its collector, which collector, and the version of its weights."""
        self.arrived: deque[tuple[float, int, int]] = deque()
        """The same for segments on the learner's link, with the time at which they arrive."""
        self.segments: deque[list[float]] = deque()
        """For each ingested segment, the transitions that are not consumed yet, and its collector."""
        self.behind: list[int] = []
        self.credits = deque([*range(n)] * AHEAD)
        self.limit, self.outstanding = min(float(n * AHEAD), 8.0), 0

    def spend_credits(self) -> None:
        while self.credits and self.outstanding < int(self.limit):
            self.outstanding += 1
            self.request(self.credits.popleft())

    def request(self, collector: int) -> None:
        starts, machine = self.now + LATENCY, collector // PER_MACHINE
        version = len(self.version_at) - 1
        if self.sent_version[machine] < version:  # the first collector of a machine fetches the weights
            self.sent_version[machine] = version
            self.out_free = max(self.out_free, self.now) + self.measured.weights / BANDWIDTH
            self.bytes_out += self.measured.weights
            starts = self.out_free + LATENCY
        seconds = self.measured.collect * float(self.rng.lognormal(-(SPREAD**2) / 2, SPREAD))
        self.free[collector] = max(self.free[collector], starts) + seconds
        heapq.heappush(self.done, (self.free[collector], collector, version))

    def receive(self) -> None:
        """Send the segments that have left their collectors over the learner's link, one after the other."""
        size = self.measured.bytes_per_transition * SEGMENT / BANDWIDTH
        while self.done and (self.done[0][0] <= self.now or not self.arrived):
            at, collector, version = heapq.heappop(self.done)
            self.in_free = max(self.in_free, at) + size
            self.arrived.append((self.in_free + LATENCY, collector, version))

    def ingest(self) -> None:
        at, collector, version = self.arrived.popleft()
        cost = self.measured.ingest + self.measured.call
        self.waited += max(0.0, at - self.now)
        self.now = max(self.now, at) + cost
        self.took_in += cost
        self.n_segments += 1
        self.behind.append(self.updates - self.version_at[version])
        self.segments.append([float(SEGMENT), collector])

    def consume(self, transitions: float) -> None:
        """Consume transitions as the learner does, with the same rules for the number of outstanding requests."""
        self.receive()
        while self.arrived and self.arrived[0][0] <= self.now:
            self.ingest()
        while transitions > 0:
            if not self.segments:
                self.limit = min(1.5 * self.limit, AHEAD * self.n)
                self.spend_credits()
                self.receive()
                self.ingest()
            first = self.segments[0]
            used = min(first[0], transitions)
            first[0], transitions = first[0] - used, transitions - used
            if first[0] == 0:
                self.segments.popleft()
                self.outstanding -= 1
                self.credits.append(int(first[1]))
                if len(self.segments) > 1 + self.limit / 2:
                    self.limit = max(self.limit - 0.2, 2.0)
            self.spend_credits()

    def run(self, seconds: float) -> None:
        # The learner polls all requests after every step, or, with many collectors, after every n // 8 steps.
        polls = self.transitions / N_ENVS / max(1, self.n // 8)
        while self.now < seconds:
            polling = polls * self.measured.poll * self.outstanding / 2_000
            self.now += polling
            self.took_in += polling
            self.consume(self.transitions)
            if self.gradient:
                self.now += self.gradient
                self.updates += 1
                if self.updates % SYNC_EVERY == 0:
                    self.now += self.measured.publish
                    self.published += self.measured.publish
                    self.version_at.append(self.updates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds to simulate (default: %(default)s)")
    options = parser.parse_args()
    measured = measure()
    for name, value in vars(measured).items():
        shown = f"{value:,.0f} bytes" if name in ("bytes_per_transition", "weights") else f"{1e3 * value:.2f} ms"
        print(f"{name.replace('_', ' '):22} {shown}")
    learners = {
        "SB3's DQN, on this CPU": (measured.gradient, 4.0),
        "the ratio and speed of Ape-X": (1 / 19, 12_500 / 19),
        "no training": (0.0, float(SEGMENT)),
    }
    for learner, (gradient, transitions) in learners.items():
        print(f"\n{learner}")
        rows = []
        for n in COUNTS:
            simulation = Simulation(measured, n, gradient, transitions)
            simulation.run(options.seconds)
            now = simulation.now
            rate = simulation.n_segments * SEGMENT / now
            shares = (simulation.took_in, simulation.published, simulation.waited)
            columns = [f"{n:,}", f"{rate:,.0f}", f"{rate * measured.bytes_per_transition / 1e6:,.1f}"]
            columns += [f"{simulation.bytes_out / now / 1e6:,.1f}", *(f"{share / now:.1%}" for share in shares)]
            rows.append([*columns, f"{np.mean(simulation.behind):,.0f}"])
        print(markdown_table(HEADINGS, rows))


if __name__ == "__main__":
    main()
