"""One thread adds while another samples: a batch never mixes two states. Forks of two threads leave no lock behind."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.compressed import CompressedNStepReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.compressed.prioritized_buffer import CompressedPrioritizedReplayBuffer

SPACE = spaces.Box(-np.inf, np.inf, (3,), np.float32)


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (CompressedReplayBuffer, {}),
        (CompressedReplayBuffer, {"optimize_memory_usage": True, "handle_timeout_termination": False}),
        (CompressedNStepReplayBuffer, {"n_steps": 3, "gamma": 1.0}),
        (CompressedPrioritizedReplayBuffer, {"optimize_memory_usage": True, "handle_timeout_termination": False}),
    ],
)
def test_transitions_are_whole(cls: type[CompressedReplayBuffer], options: dict[str, Any]) -> None:
    n_steps = options.get("n_steps", 1)
    buffer = cls(16, SPACE, spaces.Box(-np.inf, np.inf, (1,), np.float32), "cpu", **options)
    number = 0

    def add() -> None:
        nonlocal number
        obs, following = (np.full((1, 3), value, np.float32) for value in (number, number + 1))
        buffer.add(obs, following, np.full((1, 1), number), np.full(1, number), np.zeros(1), [{}])
        number += 1

    for _ in range(40):
        add()
    wrong, done = [], threading.Event()

    def sample() -> None:
        while not done.is_set():
            batch: Any = buffer.sample(32)
            obs, action = batch.observations[:, 0].numpy(), batch.actions[:, 0].numpy()
            ahead = (batch.next_observations[:, 0].numpy() - obs).astype(int)
            rewards = np.array([sum(first + i for i in range(n)) for first, n in zip(obs, ahead, strict=True)])
            right = (obs == action) & (ahead >= 1) & (ahead <= n_steps) & (batch.rewards[:, 0].numpy() == rewards)
            wrong.extend(np.flatnonzero(~right).tolist())

    thread = threading.Thread(target=sample)
    thread.start()
    for _ in range(4000):
        add()
    done.set()
    thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_forks_of_two_threads_leave_no_lock_behind() -> None:
    buffers = [CompressedReplayBuffer(10, SPACE, spaces.Discrete(2), "cpu") for _ in range(5)]

    def fork() -> None:
        n_forks = 0
        while n_forks < 30:
            try:
                child = os.fork()
            except RuntimeError:
                continue  # filelock, once it is imported, refuses a fork in the middle of another thread's
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            n_forks += 1

    threads = [threading.Thread(target=fork, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert all(buffer._lock.held.acquire(timeout=1) for buffer in buffers)
