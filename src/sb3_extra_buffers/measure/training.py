"""Train DQN on an Atari game, and measure time and memory of its replay buffer."""

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
from sb3_extra_buffers.measure.transitions import collect
from sb3_extra_buffers.training_utils.callbacks import CallTimer

N_ENVS = 4


@dataclass(frozen=True)
class TrainingRun:
    """What was measured."""

    transitions: int
    seconds: float
    add: CallTimer
    sample: CallTimer
    buffer_bytes: int
    peak_rss: int
    memory_usage: str | None
    policy_hash: str


class _ProgressBar(BaseCallback):
    def __init__(self, title: str, steps: int) -> None:
        super().__init__()
        self.bar = tqdm(total=steps, desc=f"{title:>22}", unit="step")

    def _on_step(self) -> bool:
        self.bar.update(self.training_env.num_envs)
        return True

    def _on_training_end(self) -> None:
        self.bar.close()


def train(buffer: str, env_id: str, steps: int, buffer_size: int, seed: int) -> TrainingRun:
    """Train with the buffer class named ``module:class``. Call it in a fresh process."""
    module, _, name = buffer.partition(":")
    buffer_class = getattr(importlib.import_module(module), name)
    _warm_up(buffer_class, env_id, seed, min(250, steps))
    env = make_env(env_id, N_ENVS, seed)
    model = DQN(
        "CnnPolicy",
        env,
        buffer_size=buffer_size,
        learning_starts=min(1_000, steps // 8),
        train_freq=8,
        target_update_interval=1_000,
        replay_buffer_class=buffer_class,
        seed=seed,
    )
    replay_buffer: Any = model.replay_buffer
    add, sample = (CallTimer.attach(replay_buffer, method) for method in ("add", "sample"))
    start = time.perf_counter()
    model.learn(steps, callback=_ProgressBar(name, steps))
    seconds = time.perf_counter() - start
    env.close()
    for timer in (add, sample):
        timer.detach()

    usage = repr(replay_buffer.memory_usage()) if hasattr(replay_buffer, "memory_usage") else None
    transitions = replay_buffer.size() * N_ENVS
    # The buffer's memory is what the system gets back without it: training grows the process for other reasons, too.
    with_buffer = settled_rss()
    model.replay_buffer = replay_buffer = None
    return TrainingRun(
        transitions=transitions,
        seconds=seconds,
        add=add,
        sample=sample,
        buffer_bytes=with_buffer - settled_rss(),
        peak_rss=peak_rss(),
        memory_usage=usage,
        policy_hash=hash_of(model.policy),
    )


def _warm_up(buffer_class: type[ReplayBuffer], env_id: str, seed: int, steps: int) -> None:
    """Use a small buffer, so that loading and compiling code does not count as time of ``add``."""
    env = make_env(env_id, N_ENVS, seed)
    buffer = buffer_class(1_000, env.observation_space, env.action_space, n_envs=N_ENVS)
    for transition in collect(env, steps):
        buffer.add(*transition)
    buffer.sample(32)
    env.close()


def hash_of(policy: BasePolicy) -> str:
    """The SHA-256 of all weights."""
    digest = hashlib.sha256()
    for name, tensor in policy.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()
