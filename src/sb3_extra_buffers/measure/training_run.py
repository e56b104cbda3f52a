"""One training run of DQN on an Atari game, with a replay buffer whose time and memory are measured."""

from __future__ import annotations

import hashlib
import importlib
import time
from dataclasses import dataclass
from typing import Any

from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import BasePolicy
from tqdm import tqdm

from sb3_extra_buffers.measure.environments import make_env
from sb3_extra_buffers.measure.memory import peak_rss, settled_rss
from sb3_extra_buffers.measure.playing import play

N_ENVS = 4


@dataclass(frozen=True)
class Options:
    """What a run is told."""

    env: str
    steps: int
    buffer_size: int
    seed: int


@dataclass(frozen=True)
class TrainingRun:
    """What a run has shown."""

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


def train(buffer: str, title: str, options: Options) -> TrainingRun:
    """Train in this process, which should be a fresh one, with the buffer class named ``module:class``."""
    module, _, name = buffer.partition(":")
    buffer_class = getattr(importlib.import_module(module), name)
    warm_up(buffer_class, options)
    env = make_env(options.env, N_ENVS, options.seed)
    model = DQN(
        "CnnPolicy",
        env,
        buffer_size=options.buffer_size,
        learning_starts=min(1_000, options.steps // 8),
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
    return TrainingRun(
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
    env = make_env(options.env, N_ENVS, options.seed)
    buffer = buffer_class(1_000, env.observation_space, env.action_space, n_envs=N_ENVS)
    for transition in play(env, steps=min(250, options.steps)):
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
