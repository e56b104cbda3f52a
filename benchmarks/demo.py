"""Train DQN on an Atari game twice, with SB3's replay buffer and with a compressed one, and compare the two runs.

Both start from the same seed, each in a process of its own. The networks they end with must be bit-identical.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import BasePolicy
from tqdm import tqdm

from benchmarks.environments import make_atari
from benchmarks.memory import peak_rss, run_in_fresh_process, settled_rss
from benchmarks.recordings import play

SB3_BUFFER = "stable_baselines3.common.buffers:ReplayBuffer"
COMPRESSED_BUFFER = "sb3_extra_buffers.compressed:CompressedReplayBuffer"
N_ENVS = 4


@dataclass(frozen=True)
class Options:
    env: str
    steps: int
    buffer_size: int
    seed: int


@dataclass(frozen=True)
class Result:
    transitions: int
    seconds: float
    add_seconds: list[float]
    sample_seconds: list[float]
    buffer_bytes: int
    peak_rss: int
    memory_usage: str | None
    policy_hash: str


class ProgressBar(BaseCallback):
    """Shows environment steps as they are taken."""

    def __init__(self, title: str, steps: int) -> None:
        super().__init__()
        self.bar = tqdm(total=steps, desc=f"{title:>22}", unit="step")

    def _on_step(self) -> bool:
        self.bar.update(self.training_env.num_envs)
        return True

    def _on_training_end(self) -> None:
        self.bar.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="MsPacmanNoFrameskip-v4", help="an Atari game (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8_000, help="environment steps per run (default: %(default)s)")
    parser.add_argument("--buffer-size", type=int, default=40_000, help="transitions (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of both runs (default: %(default)s)")
    parser.add_argument("--buffer", default=COMPRESSED_BUFFER, metavar="MODULE:CLASS", help="default: %(default)s")
    arguments = parser.parse_args()
    options = Options(arguments.env, arguments.steps, arguments.buffer_size, arguments.seed)
    # torch's threads wait in a busy loop unless told not to, which slows training tenfold beside other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    ours_name = arguments.buffer.partition(":")[2]
    print(f"DQN on {options.env}: {options.steps:,} steps of {N_ENVS} environments, once with each buffer\n")
    sb3 = run_in_fresh_process(train, SB3_BUFFER, "SB3 ReplayBuffer", options)
    ours = run_in_fresh_process(train, arguments.buffer, ours_name, options)

    print_comparison(sb3, ours, ours_name)
    identical = sb3.policy_hash == ours.policy_hash
    print(f"\nTrained networks: {'bit-identical' if identical else 'DIFFERENT'} (sha256 {ours.policy_hash[:16]})")
    return 0 if identical else 1


def train(buffer: str, title: str, options: Options) -> Result:
    """Train in this process, with the buffer class named ``module:class``."""
    module, _, name = buffer.partition(":")
    buffer_class = getattr(importlib.import_module(module), name)
    warm_up(buffer_class, options)
    env = make_atari(options.env, N_ENVS, options.seed)
    model = DQN(
        "CnnPolicy",
        env,
        buffer_size=options.buffer_size,
        learning_starts=1_000,
        train_freq=8,
        target_update_interval=1_000,
        replay_buffer_class=measured(buffer_class),
        seed=options.seed,
    )
    start = time.perf_counter()
    model.learn(options.steps, callback=ProgressBar(title, options.steps))
    seconds = time.perf_counter() - start
    env.close()

    replay_buffer: Any = model.replay_buffer
    summary = repr(replay_buffer.memory_usage()) if hasattr(replay_buffer, "memory_usage") else None
    transitions = replay_buffer.size() * N_ENVS
    add_seconds, sample_seconds = replay_buffer.add_seconds, replay_buffer.sample_seconds
    # What a buffer takes is what the system has back without it. Growth during training has other causes as well.
    with_buffer = settled_rss()
    model.replay_buffer = replay_buffer = None
    return Result(
        transitions=transitions,
        seconds=seconds,
        add_seconds=add_seconds,
        sample_seconds=sample_seconds,
        buffer_bytes=with_buffer - settled_rss(),
        peak_rss=peak_rss(),
        memory_usage=summary,
        policy_hash=hash_of(model.policy),
    )


def warm_up(buffer_class: type[ReplayBuffer], options: Options) -> None:
    """Fill and drop a small buffer, so that loading and compiling code does not count as time of ``add``."""
    env = make_atari(options.env, N_ENVS, options.seed)
    buffer = buffer_class(1_000, env.observation_space, env.action_space, n_envs=N_ENVS)
    for transition in play(env, steps=250):
        buffer.add(*transition)
    buffer.sample(32)
    env.close()


def measured(buffer_class: type[ReplayBuffer]) -> type[ReplayBuffer]:
    """Derive a class that times ``add`` and ``sample``."""

    class Measured(buffer_class):  # type: ignore[misc, valid-type]  # the base is only known at run time
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.add_seconds: list[float] = []
            self.sample_seconds: list[float] = []
            super().__init__(*args, **kwargs)

        def add(self, *args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            super().add(*args, **kwargs)
            self.add_seconds.append(time.perf_counter() - start)

        def sample(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            samples = super().sample(*args, **kwargs)
            self.sample_seconds.append(time.perf_counter() - start)
            return samples

    return Measured


def hash_of(policy: BasePolicy) -> str:
    digest = hashlib.sha256()
    for name, tensor in policy.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def print_comparison(sb3: Result, ours: Result, ours_name: str) -> None:
    rows = [
        ("memory of the buffer", [f"{r.buffer_bytes / 1e6:,.1f} MB" for r in (sb3, ours)]),
        ("  per transition", [f"{r.buffer_bytes / r.transitions:,.0f} bytes" for r in (sb3, ours)]),
        ("peak memory of the process", [f"{r.peak_rss / 1e6:,.0f} MB" for r in (sb3, ours)]),
        ("add, mean", [f"{statistics.mean(r.add_seconds) * 1e6:,.0f} µs" for r in (sb3, ours)]),
        ("sample, mean", [f"{statistics.mean(r.sample_seconds) * 1e6:,.0f} µs" for r in (sb3, ours)]),
        ("add and sample, total", [f"{sum(r.add_seconds + r.sample_seconds):,.2f} s" for r in (sb3, ours)]),
        ("environment steps per second", [f"{r.transitions / r.seconds:,.0f}" for r in (sb3, ours)]),
    ]
    print(f"\n{f'{sb3.transitions:,} transitions stored':<30} {'SB3 ReplayBuffer':>24} {ours_name:>24}")
    for label, values in rows:
        print(f"{label:<30} {values[0]:>24} {values[1]:>24}")
    if ours.memory_usage is not None:
        print(f"\n{ours_name}.memory_usage():\n{ours.memory_usage}")


if __name__ == "__main__":
    raise SystemExit(main())
