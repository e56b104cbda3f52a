"""Doom as RGB images and as semantic-segmentation masks: compare their memory, then train PPO on the masks.

A random policy plays a scenario, and rollout buffers store it: RGB images and masks uncompressed, and masks compressed,
each in a fresh process. In a published experiment, a rollout of 47,000 observations of 240x320 took 11 GB as RGB
images, 3.6 GB as masks and 150 MB as compressed masks. The table scales the measured sizes to 47,000 observations, but
its policy differs from the published one, and the classes of the masks may differ, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnv
from tqdm import tqdm

import common
from doom import VizdoomEnv, make_env
from sb3_extra_buffers.compressed import CompressedRolloutBuffer
from sb3_extra_buffers.measure.buffers import SB3, Task
from sb3_extra_buffers.measure.memory import settled_rss
from sb3_extra_buffers.measure.processes import run_in_fresh_process
from sb3_extra_buffers.measure.transitions import collect
from sb3_extra_buffers.recording import RecordBuffer
from sb3_extra_buffers.storage.usage import readable
from sb3_extra_buffers.training_utils.eval_model import eval_model

PUBLISHED_OBSERVATIONS = 47_000
PUBLISHED = {"RGB": "11 GB", "masks": "3.6 GB"}
NAME = "ppo_doom"
CHANGE_OF_MIND = 0.2
"""The probability that the random player chooses a new action in a step."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.arguments(__doc__, steps=100_000, n_envs=4)
    parser.add_argument("--scenario", default="deathmatch", help="ViZDoom scenario, such as deathmatch or basic")
    parser.add_argument("--observations", type=int, default=2_000, help="observations to store for the table")
    parser.add_argument("--methods", default="rle-jit,delta,zstd-dict/3,auto", help="comma-separated, for the masks")
    parser.add_argument("--compression", default="auto", help="compression method for training")
    parser.add_argument("--episodes", type=int, default=2, help="episodes to evaluate after training")
    parser.add_argument("--curve", type=Path, metavar="CSV", help="write the learning curve to this file")
    parser.add_argument("--video", type=Path, default=Path("doom.mp4"), help="write images and masks to this video")
    options = parser.parse_args(argv)

    print(f"{options.observations:,} observations of {options.scenario}, 240x320\n")
    print(compare(options.scenario, options.observations, options.methods.split(","), options.seed))
    if options.steps:
        train(options)
    film(options.scenario, options.video, options.seed)


# Memory


def compare(scenario: str, n: int, methods: list[str], seed: int) -> str:
    kinds = [("RGB", "rgb", SB3), ("masks", "mask", SB3), *((f"masks, {m}", "mask", m) for m in methods)]
    measured = [
        (label, run_in_fresh_process(store, scenario, view, method, n, seed))
        for label, view, method in tqdm(kinds, unit="buffer")
    ]
    whole = measured[0][1][0]
    return common.table(
        ["Stored as", "Observations", "Memory", "of RGB", "47,000 would take", "published"],
        [
            [
                label,
                readable(size),
                readable(memory),
                f"{100 * size / whole:.2f}%",
                readable(size * PUBLISHED_OBSERVATIONS / n),
                PUBLISHED.get(label, "150 MB"),
            ]
            for label, (size, memory) in measured
        ],
    )


def store(scenario: str, view: Any, method: str, n: int, seed: int) -> tuple[int, int]:
    """Bytes of a rollout of ``n`` observations, and the growth of this process's resident memory."""
    env = make_env(scenario, 1, view=view, resolution=(240, 320), seed=seed)
    task = Task("Rollout", env.observation_space, env.action_space, 1)
    for size in (min(n, 50), n):  # the first, small buffer triggers imports and compilation
        before = settled_rss()
        buffer = task.make(method, size)
        for transition in collect(env, size, policy=Wanderer(env, seed)):
            task.add(buffer, transition)
    grown = settled_rss() - before
    env.close()
    return common.observation_bytes(buffer), grown


class Wanderer:
    """A random player that repeats each action for a while. Otherwise it would stay in place and only see a wall."""

    def __init__(self, env: VecEnv, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.n_actions = cast(spaces.Discrete, env.action_space).n
        self.action = self.rng.integers(self.n_actions, size=1)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        if self.rng.random() < CHANGE_OF_MIND:
            self.action = self.rng.integers(self.n_actions, size=1)
        return self.action, None


# Learning


def train(options: Any) -> None:
    env = make_env(options.scenario, options.n_envs, view="mask", spread=True, seed=options.seed)
    model = PPO(
        "CnnPolicy",
        env,
        **common.rollout_size(options, n_steps=128, batch_size=64),
        n_epochs=4,
        learning_rate=2.5e-4,
        ent_coef=0.01,
        rollout_buffer_class=CompressedRolloutBuffer,
        rollout_buffer_kwargs={"compression_method": options.compression},
        seed=options.seed,
        device=options.device,
    )
    print(f"\nPPO on the masks of {options.scenario}")
    common.train(model, NAME, options)
    print(eval_model(options.episodes, env, model, deterministic=False))


def film(scenario: str, path: Path, seed: int) -> None:
    env = VizdoomEnv(scenario, view="both", resolution=(240, 320), spread=True)
    record = RecordBuffer(res=(240, 640))
    obs, _ = env.reset(seed=seed)
    env.action_space.seed(seed)
    rng = np.random.default_rng(seed)
    action = np.int64(0)
    for _ in range(300):
        if rng.random() < CHANGE_OF_MIND:
            action = env.action_space.sample()
        following, reward, terminated, truncated, _ = env.step(action)
        record.add(np.concatenate([obs["rgb"], np.repeat(obs["mask"], 3, axis=2)], axis=1), reward, action)
        if terminated or truncated:
            break
        obs = following
    env.close()
    record.save_video(path, fps=35 / env.frame_skip)
    print(f"\nvideo of images and masks, side by side: {path}")


if __name__ == "__main__":
    main()
