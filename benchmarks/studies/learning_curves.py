"""Train PPO and DQN on CartPole twice, with SB3's buffer and with a compressed one, and keep both learning curves.

    python -m benchmarks.studies.learning_curves

The hyperparameters are those of RL Zoo. With the same seed, every episode must have the same return, and the trained
networks must be bit-identical, so the curves coincide. `python -m benchmarks.front_page` draws them.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch as th
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.measure.training import hash_of

RESULTS = Path(__file__).parents[1] / "results" / "learning_curves.csv"
ENV = "CartPole-v1"
COLUMNS = ["algorithm", "buffer", "step", "return"]


class Training(NamedTuple):
    algorithm: type[BaseAlgorithm]
    n_envs: int
    steps: int
    arguments: dict[str, Any]
    """Arguments of both training runs."""
    ours: dict[str, Any]
    """Additional arguments for the compressed buffer: what a user would change."""


TRAININGS = {
    "PPO": Training(
        PPO, 8, 60_000,
        {"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20,
         "learning_rate": lambda left: 0.001 * left, "clip_range": lambda left: 0.2 * left},
        {"rollout_buffer_class": CompressedRolloutBuffer},
    ),
    "DQN": Training(
        DQN, 1, 60_000,
        {"learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1_000, "train_freq": 256,
         "gradient_steps": 128, "target_update_interval": 10, "exploration_fraction": 0.16,
         "exploration_final_eps": 0.04, "policy_kwargs": {"net_arch": [256, 256]}},
        {"replay_buffer_class": CompressedReplayBuffer},
    ),
}  # fmt: skip


class Returns(BaseCallback):
    """Records the return of each episode, and the step at which it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.episodes: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.episodes.append((self.num_timesteps, float(info["episode"]["r"])))
        return True


def train(training: Training, compressed: bool, steps: int) -> tuple[list[tuple[int, float]], str]:
    """Return the episodes, and the hash of the network at the end."""
    algorithm: Any = training.algorithm
    arguments = {**training.arguments, **(training.ours if compressed else {})}
    model = algorithm("MlpPolicy", make_vec_env(ENV, training.n_envs, seed=1), seed=1, device="cpu", **arguments)
    returns = Returns()
    model.learn(steps, callback=returns)
    return returns.episodes, hash_of(model.policy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="steps of each training run (default: 60,000, about a minute each)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write the curves")
    arguments = parser.parse_args()
    th.set_num_threads(1)
    same = True
    rows = []
    for name, training in TRAININGS.items():
        found = []
        for buffer in ("SB3", "compressed"):
            began = time.perf_counter()
            found.append(train(training, buffer == "compressed", arguments.steps or training.steps))
            episodes = found[-1][0]
            rows += [(name, buffer, step, f"{value:g}") for step, value in episodes]
            print(
                f"{name} with {buffer} buffer: {len(episodes)} episodes, {time.perf_counter() - began:.0f} s",
                flush=True,
            )
        identical = found[0] == found[1]
        same &= identical
        print(f"{name}: curves and networks are {'identical, bit for bit' if identical else 'DIFFERENT'}")
    with arguments.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
