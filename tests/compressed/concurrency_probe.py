"""Runs what might deadlock or crash in a process of its own.

python -m tests.compressed.concurrency_probe fork delta
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.vec_env import SubprocVecEnv

from sb3_extra_buffers.compressed import CompressedReplayBuffer, find_buffer_dtypes, has_numba
from tests.environments import SpaceEnv
from tests.transitions import play

SPACE = spaces.Box(0, 255, (4, 42, 42), np.uint8)
N_ENVS = 2
SLOTS = 300


def full_buffer(method: str) -> CompressedReplayBuffer:
    buffer = CompressedReplayBuffer(
        SLOTS * N_ENVS, SPACE, spaces.Discrete(5), "cpu", n_envs=N_ENVS, compression_method=method
    )
    for transition in itertools.islice(play(SPACE, N_ENVS), SLOTS + 50):
        buffer.add(*transition)
    return buffer


def batch_at(buffer: CompressedReplayBuffer, seed: int) -> list[np.ndarray]:
    """A batch that depends on nothing but the buffer: threads share NumPy's generator."""
    rng = np.random.default_rng(seed)
    # Enough to be decoded by several threads.
    slots, envs = rng.integers(0, SLOTS, 300), rng.integers(0, N_ENVS, 300)
    return [column[slots, envs] for column in (buffer.observations, buffer.next_observations)]


def check(buffer: CompressedReplayBuffer, expected: dict[int, list[np.ndarray]], seeds: Any) -> None:
    for seed in seeds:
        # Not compared by torch, whose own threads would wait for ever in a forked process.
        if not np.array_equal(batch_at(buffer, seed), expected[seed]):
            raise AssertionError(f"batch {seed} is wrong")


def threads_that_sample(method: str) -> None:
    """Some through ``sample``, with other allocations between, some by index."""
    buffer = full_buffer(method)
    expected = {seed: batch_at(buffer, seed) for seed in range(8)}
    start = threading.Barrier(4)

    def read() -> None:
        start.wait()
        for _ in range(5):
            check(buffer, expected, range(8))

    def sample() -> None:
        start.wait()
        for _ in range(40):
            batch = buffer.sample(128)
            batch.observations.fill_(255)

    with ThreadPoolExecutor(4) as pool:
        for finished in [pool.submit(read), pool.submit(read), pool.submit(sample), pool.submit(sample)]:
            finished.result()


def workers_that_are_forked(method: str) -> None:
    """After kernels were compiled and threads were started; the parent and the workers go on."""
    if has_numba():
        find_buffer_dtypes(SPACE.shape, np.uint8, "rle-jit")
    buffer = full_buffer(method)
    expected = {seed: batch_at(buffer, seed) for seed in range(8)}
    env = SubprocVecEnv([lambda: SpaceEnv(SPACE)] * 2, start_method="fork")
    env.reset()
    for step in range(20):
        env.step_async(np.zeros(2, np.int64))
        check(buffer, expected, [step % 8])
        env.step_wait()
    env.close()
    child = os.fork()
    if child == 0:  # a worker that uses the buffer itself: threads of the parent are not there
        status = 1
        signal.alarm(60)
        try:
            check(buffer, expected, range(8))
            for transition in itertools.islice(play(SPACE, N_ENVS, seed=1), 100):
                buffer.add(*transition)
            buffer.sample(200)
            status = 0
        finally:
            os._exit(status)
    check(buffer, expected, range(8))
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise AssertionError("the forked worker failed")
    check(buffer, expected, range(8))


def training_beside_sampling(method: str) -> None:
    """Torch's own threads, and the model's buffer, while another thread reads another buffer."""
    th.set_num_threads(2)
    buffer = full_buffer(method)
    expected = {seed: batch_at(buffer, seed) for seed in range(8)}
    options = {"learning_starts": 20, "train_freq": 4, "batch_size": 16, "buffer_size": 200}
    model = DQN(
        "MlpPolicy",
        SubprocVecEnv([lambda: SpaceEnv(SPACE)] * 2, start_method="fork"),
        policy_kwargs={"net_arch": [64]},
        replay_buffer_class=CompressedReplayBuffer,
        replay_buffer_kwargs={"compression_method": method},
        device="cpu",
        **options,
    )
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: [check(buffer, expected, range(8)) for _ in range(5)])
        model.learn(48)
        reading.result()
    model.get_env().close()


if __name__ == "__main__":
    name, *methods = sys.argv[1:]
    cases = {"threads": threads_that_sample, "fork": workers_that_are_forked, "training": training_beside_sampling}
    for chosen in methods:
        cases[name](chosen)
    sys.stdout.write("done")
