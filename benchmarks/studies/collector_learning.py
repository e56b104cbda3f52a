"""Does learning from collectors take more gradient steps than SB3's own loop, and which option matters?

    python -m benchmarks.studies.collector_learning [--seeds 5]

DQN plays Catch, a small image environment, until the mean return of the last 100 episodes is 0.6. SB3's DQN has one
process with 4 environments. The others have 2 collectors with 4 environments each, all in this process, so that runs
are reproducible: they send as many segments ahead as a fast collector would.
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.distributed import ShardedReplayBuffer, ape_x, distributed

SIZE, GOAL, MOST = 8, 0.6, 200_000
VARIANTS: dict[str, dict[str, Any]] = {
    "collectors, defaults": {},
    "sync_every=10": {"sync_every": 10},
    "sync_every=1": {"sync_every": 1},
    "segment_steps=8": {"segment_steps": 8},
    "ahead=1": {"ahead": 1},
    "segment_steps=8, ahead=1, sync_every=1": {"segment_steps": 8, "ahead": 1, "sync_every": 1},
    "ape_x": {"algorithm_kwargs": ape_x},
}


class Catch(gym.Env[Any, Any]):
    """A ball falls, and a paddle has to catch it: +1 if it does, -1 if not."""

    observation_space = gym.spaces.Box(0, 255, (SIZE, SIZE), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def _image(self) -> Any:
        image = np.zeros((SIZE, SIZE), np.uint8)
        image[self.row, self.column] = 255
        image[-1, self.paddle] = 255
        return image

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.row, self.column, self.paddle = 0, int(self.np_random.integers(SIZE)), SIZE // 2
        return self._image(), {}

    def step(self, action: Any) -> Any:
        self.row += 1
        self.paddle = min(max(self.paddle + int(action) - 1, 0), SIZE - 1)
        is_over = self.row == SIZE - 1
        return self._image(), (1.0 if self.paddle == self.column else -1.0) * is_over, is_over, False, {}


class UntilGoal(BaseCallback):
    """Ends training when the mean return of the last 100 episodes reaches the goal."""

    def _on_step(self) -> bool:
        recent = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        return len(recent) < 100 or float(np.mean(recent)) < GOAL


def gradient_steps(collectors: dict[str, Any] | None, seed: int) -> int:
    given: dict[str, Any] = {
        "learning_starts": 1_000,
        "buffer_size": 50_000,
        "train_freq": 1,
        "target_update_interval": 500,
        "learning_rate": 5e-4,
        "exploration_fraction": 0.05,
        "exploration_final_eps": 0.05,
        "seed": seed,
        "device": "cpu",
    }
    if collectors is None:
        env = make_vec_env(Catch, 4, seed=seed)
        model: Any = DQN("MlpPolicy", env, replay_buffer_class=CompressedReplayBuffer, **given)
    else:
        options = {"n": 2, "envs": 4, "make_env": Catch, "in_process": True, **collectors}
        sharded = {"replay_buffer_class": ShardedReplayBuffer}
        model = distributed(DQN)("MlpPolicy", Catch(), collectors=options, **sharded, **given)
    model.learn(MOST, callback=UntilGoal())
    return int(model._n_updates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each variant (default: %(default)s)")
    parser.add_argument("--only", help="variants whose name contains this")
    options = parser.parse_args()
    th.set_num_threads(1)
    variants = {"SB3": None, **{name: value for name, value in VARIANTS.items() if (options.only or "") in name}}
    base = 0.0
    print(f"{'':40} {'gradient steps':>14} {'std. error':>11} {'against SB3':>12}")
    for name, collectors in variants.items():
        found = [gradient_steps(collectors, seed) for seed in range(options.seeds)]
        mean = float(np.mean(found))
        base = base or mean
        error = float(np.std(found, ddof=1)) / len(found) ** 0.5 if len(found) > 1 else float("nan")
        print(f"{name:40} {mean:14,.0f} {error:11,.0f} {mean / base - 1:+12.0%}", flush=True)


if __name__ == "__main__":
    main()
