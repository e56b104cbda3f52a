"""Train DQN on an Atari game in a custom loop, in the style of CleanRL's dqn_atari, with a compressed replay buffer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, RecordEpisodeStatistics
from stable_baselines3.common.utils import get_device, set_random_seed
from torch import nn
from tqdm import tqdm

import common
from sb3_extra_buffers import CompressedReplayBuffer
from sb3_extra_buffers.codecs.availability import require

GAMMA, BATCH, TRAIN_EVERY, TARGET_EVERY = 0.99, 32, 4, 1000


def make_game(env_id: str) -> gym.Env[Any, Any]:
    require("ale_py", "Atari", "atari")  # importing ale_py registers the games
    env = RecordEpisodeStatistics(gym.make(env_id, frameskip=1))
    return FrameStackObservation(AtariPreprocessing(env), 4)


class QNetwork(nn.Sequential):
    def __init__(self, n_actions: int) -> None:
        super().__init__(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, n_actions),
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.arguments(__doc__, steps=1_000_000, n_envs=1)
    parser.add_argument("--env", default="ALE/Breakout-v5", help="an Atari game")
    parser.add_argument("--buffer-size", type=int, default=1_000_000, help="transitions in the replay buffer")
    parser.add_argument("--learning-starts", type=int, default=80_000, help="steps before training starts")
    options = parser.parse_args(argv)
    set_random_seed(options.seed)
    device = get_device(options.device)
    env = make_game(options.env)
    assert isinstance(env.action_space, gym.spaces.Discrete)
    n_actions = int(env.action_space.n)
    online, target = QNetwork(n_actions).to(device), QNetwork(n_actions).to(device)
    target.load_state_dict(online.state_dict())
    optimizer = th.optim.Adam(online.parameters(), lr=1e-4)
    # Replaces stable_baselines3.common.buffers.ReplayBuffer(..., optimize_memory_usage=True), which takes 28 GB.
    rb = CompressedReplayBuffer(options.buffer_size, env.observation_space, env.action_space, device)

    returns: deque[float] = deque(maxlen=100)
    began = time.perf_counter()
    obs, _ = env.reset(seed=options.seed)
    for step in (bar := tqdm(range(options.steps), unit="step")):
        epsilon = max(0.01, 1 - step / (0.1 * options.steps))
        if np.random.random() < epsilon:
            action = np.random.randint(n_actions)
        else:
            with th.no_grad():
                action = int(online(th.as_tensor(obs, device=device)[None].float() / 255).argmax())
        next_obs, reward, terminated, truncated, info = env.step(action)
        info["TimeLimit.truncated"] = truncated and not terminated  # bootstrap from the last observation
        # A single environment needs no environment axis.
        rb.add(obs, next_obs, action, np.sign(float(reward)), terminated or truncated, [info])
        obs = next_obs
        if terminated or truncated:
            returns.append(float(info["episode"]["r"]))
            bar.set_postfix(mean_return=f"{np.mean(returns):.1f}", refresh=False)
            obs, _ = env.reset()

        if step >= min(options.learning_starts, options.steps // 2) and step % TRAIN_EVERY == 0:
            data = rb.sample(BATCH)
            with th.no_grad():
                best = target(data.next_observations.float() / 255).max(dim=1, keepdim=True).values
                goal = data.rewards + GAMMA * best * (1 - data.dones)
            values = online(data.observations.float() / 255).gather(1, data.actions)
            loss = nn.functional.mse_loss(values, goal)
            optimizer.zero_grad()
            th.autograd.backward(loss)
            optimizer.step()
        if step % TARGET_EVERY == 0:
            target.load_state_dict(online.state_dict())
    mean = f"mean return {np.mean(returns):.2f}" if returns else ""
    print(f"\n{options.steps:,} steps in {time.perf_counter() - began:.0f} s; last {len(returns)} episodes: {mean}")
    print(rb.memory_usage())
    env.close()


if __name__ == "__main__":
    main()
