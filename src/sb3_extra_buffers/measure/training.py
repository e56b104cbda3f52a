"""Train DQN on an Atari game, and measure speed and memory with a given replay buffer."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any

from stable_baselines3 import DQN
from stable_baselines3.common.policies import BasePolicy
from tqdm import tqdm

from sb3_extra_buffers.measure.buffers import Task
from sb3_extra_buffers.measure.environments import make_env
from sb3_extra_buffers.measure.memory import peak_rss, settled_rss
from sb3_extra_buffers.measure.transitions import collect

N_ENVS = 4
_WARM_UP_STEPS = 250
"""Steps of all environments in the small buffer that is used before training."""


@dataclass(frozen=True)
class TrainingRun:
    """Results of :func:`train`."""

    transitions: int
    seconds: float
    buffer_bytes: int
    peak_rss: int
    memory_usage: str
    """The text of ``memory_usage()``; empty for SB3's buffer."""
    policy_hash: str


def train(method: str, env_id: str, steps: int, buffer_size: int, seed: int) -> TrainingRun:
    """Train with SB3's buffer or with ours. Call this in a fresh process."""
    env = make_env(env_id, N_ENVS, seed)
    task = Task("Replay", env.observation_space, env.action_space, N_ENVS)
    # Use a small buffer first, so that imports and compiling kernels do not count.
    small = task.make(method, 1_000)
    for transition in collect(env, min(_WARM_UP_STEPS, steps)):
        small.add(*transition)
    small.sample(32)
    buffer_class = type(small)
    del small
    env.close()

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
    start = time.perf_counter()
    with tqdm(total=steps, desc=f"{buffer_class.__name__:>22}", unit="step") as bar:
        model.learn(steps, callback=lambda *_: bar.update(N_ENVS) is not False)
    seconds = time.perf_counter() - start
    env.close()

    buffer: Any = model.replay_buffer
    usage = repr(buffer.memory_usage()) if hasattr(buffer, "memory_usage") else ""
    transitions = buffer.size() * N_ENVS
    # Measure what deleting the buffer frees: during training, the process also grows for other reasons.
    with_buffer = settled_rss()
    model.replay_buffer = buffer = None
    return TrainingRun(transitions, seconds, with_buffer - settled_rss(), peak_rss(), usage, hash_of(model.policy))


def hash_of(policy: BasePolicy) -> str:
    """The SHA-256 digest of all weights."""
    digest = hashlib.sha256()
    for name, tensor in policy.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()
