"""Whole training runs, with SB3's buffer and with ours: steps per second.

    python -m benchmarks.training --rounds 3

Each run is a process of its own; the two buffers take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch as th
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer
from tqdm import tqdm

from benchmarks.environments import make_env
from benchmarks.memory import run_in_fresh_process
from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer


def steps_per_second(algorithm: str, compressed: bool, steps: int) -> float:
    """Train on MsPacman; the first tenth, in which kernels are loaded and ``auto`` chooses, is not counted."""
    model = make_model(algorithm, compressed)
    model.learn(steps // 10)
    began = time.perf_counter()
    model.learn(steps, reset_num_timesteps=False)
    return (model.num_timesteps - steps // 10) / (time.perf_counter() - began)


def make_model(algorithm: str, compressed: bool) -> BaseAlgorithm:
    if algorithm == "dqn":
        replay = CompressedReplayBuffer if compressed else ReplayBuffer
        env = make_env("mspacman", 4, seed=0)
        return DQN(
            "CnnPolicy", env, buffer_size=20_000, learning_starts=100, seed=0, device="cpu", replay_buffer_class=replay
        )
    rollout = CompressedRolloutBuffer if compressed else RolloutBuffer
    env = make_env("mspacman", 8, seed=0)
    return PPO(
        "CnnPolicy", env, n_steps=128, batch_size=256, n_epochs=4, seed=0, device="cpu", rollout_buffer_class=rollout
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4_000)
    arguments = parser.parse_args()
    print(f"torch with {th.get_num_threads()} threads, {arguments.steps} steps, {arguments.rounds} rounds\n")
    print("| | SB3, steps/s | compressed, steps/s | ratio |\n|---|---|---|---|")
    for algorithm in ("dqn", "ppo"):
        found: dict[bool, list[float]] = {False: [], True: []}
        for round_number in tqdm(range(arguments.rounds), algorithm):
            for compressed in (False, True) if round_number % 2 == 0 else (True, False):
                found[compressed].append(run_in_fresh_process(steps_per_second, algorithm, compressed, arguments.steps))
        theirs, ours = statistics.median(found[False]), statistics.median(found[True])
        print(f"| {algorithm.upper()} | {theirs:.1f} | {ours:.1f} | {ours / theirs:.3f} |", flush=True)


if __name__ == "__main__":
    main()
