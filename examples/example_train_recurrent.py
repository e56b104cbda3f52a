"""Train a recurrent DQN in plain PyTorch on a memory task, with burn-in and stored states as in R2D2.

python examples/example_train_recurrent.py                    # learns: the mean return approaches 1
python examples/example_train_recurrent.py --feed-forward     # cannot: about 0
python examples/example_train_recurrent.py --env PongNoFrameskip-v4 --steps 20000
"""

from __future__ import annotations

import csv
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.utils import get_device, set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from torch import nn
from tqdm import tqdm

import common
from sb3_extra_buffers.compressed import (
    CompressedPrioritizedSequenceReplayBuffer,
    PrioritizedSequenceReplayBufferSamples,
)
from sb3_extra_buffers.training_utils.atari import make_env

LENGTH, BURN_IN, BATCH, GAMMA = 8, 4, 32, 0.97
HIDDEN, WARM_UP = 64, 1000


class Corridor(gym.Env[Any, Any]):
    """Walk from a cue to two doors at the other end of a corridor. The cue shows which door is right.

    Without memory, half of all choices are wrong, and the mean return is 0.
    """

    SIZE = 10
    observation_space = spaces.Box(0, 255, (1, 3, SIZE), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.door, self.at = int(self.np_random.integers(2)), 0
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        is_end = self.at == self.SIZE
        reward = (1.0 if action == self.door else -1.0) if is_end else 0.0
        return self._look(), reward, is_end, False, {}

    def _look(self) -> Any:
        view = np.zeros((1, 3, self.SIZE), np.uint8)
        view[0, 1, min(self.at, self.SIZE - 1)] = 255
        if self.at == 0:
            view[0, 2 * self.door, 0] = 255
        return view


class QNetwork(nn.Module):
    """Q-values for sequences, ``(time, batch, ...)``. The recurrent state after a step is the GRU's output."""

    def __init__(self, space: spaces.Box, n_actions: int, feed_forward: bool) -> None:
        super().__init__()
        if space.shape[-1] >= 36:  # the network of "Human-level control through deep reinforcement learning"
            layers: list[nn.Module] = [
                nn.Conv2d(space.shape[0], 32, 8, 4),
                nn.ReLU(),
                nn.Conv2d(32, 64, 4, 2),
                nn.ReLU(),
            ]
            layers += [nn.Conv2d(64, 64, 3, 1), nn.ReLU()]
        else:
            layers = []
        self.encoder = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(HIDDEN), nn.ReLU())
        self.memory = None if feed_forward else nn.GRU(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, n_actions)

    def forward(self, observations: th.Tensor, state: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        features = self.encoder(observations.flatten(0, 1).float() / 255).unflatten(0, observations.shape[:2])
        if self.memory is None:
            return self.head(features), th.zeros_like(features)
        states, _ = self.memory(features, state[None])
        return self.head(states), states


def unroll(network: QNetwork, batch: PrioritizedSequenceReplayBufferSamples) -> tuple[th.Tensor, th.Tensor]:
    """Q-values and states. Burn-in steps get no gradient, unless the episode begins with the sequence."""
    assert isinstance(batch.observations, th.Tensor)
    values, states = network(batch.observations[:BURN_IN], batch.latents["state"][0])
    state = th.where(batch.is_first[0][:, None], states[-1], states[-1].detach())
    later_values, later_states = network(batch.observations[BURN_IN:], state)
    return th.cat([values, later_values]), th.cat([states, later_states])


def learn(
    batch: PrioritizedSequenceReplayBufferSamples, online: QNetwork, target: QNetwork
) -> tuple[th.Tensor, th.Tensor, th.Tensor, th.Tensor]:
    """The double Q-learning loss, TD errors of all steps but the last, a mask of those that count, and all states."""
    values, states = unroll(online, batch)
    chosen = values[:-1].gather(2, batch.actions[:-1].long()).squeeze(2)
    with th.no_grad():
        best = unroll(target, batch)[0][1:].gather(2, values[1:].argmax(2, keepdim=True)).squeeze(2)
        goal = batch.rewards[:-1] + GAMMA * best * ~batch.terminals[:-1]
    # A step counts if the next step of its episode is in the batch, or if it reached a terminal state.
    counts = batch.mask[:-1] & (batch.mask[1:] | batch.terminals[:-1])
    counts[:BURN_IN] &= batch.is_first[0]  # at the start of an episode, no warm-up is needed
    losses = nn.functional.smooth_l1_loss(chosen, goal, reduction="none") * counts
    return (losses * batch.weights).sum() / counts.sum().clamp(min=1), goal - chosen, counts, states.detach()


def make(env_id: str, n_envs: int, seed: int) -> VecEnv:
    if env_id != "corridor":
        return make_env(env_id, n_envs, framestack=1, seed=seed)
    env = DummyVecEnv([lambda: Monitor(Corridor())] * n_envs)
    env.seed(seed)
    return env


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.arguments(__doc__, steps=20_000, n_envs=8)
    parser.add_argument("--env", default="corridor", help="corridor, or an Atari game")
    parser.add_argument("--feed-forward", action="store_true", help="use a network without memory")
    parser.add_argument("--buffer-size", type=int, default=50_000, help="steps in the replay buffer")
    parser.add_argument("--curve", type=Path, metavar="CSV", help="write the learning curve to this file")
    options = parser.parse_args(argv)
    set_random_seed(options.seed)
    device, n_envs = get_device(options.device), options.n_envs
    env = make(options.env, n_envs, options.seed)
    assert isinstance(env.action_space, spaces.Discrete) and isinstance(env.observation_space, spaces.Box)  # noqa: PT018
    buffer = CompressedPrioritizedSequenceReplayBuffer(
        options.buffer_size,
        env.observation_space,
        env.action_space,
        device=device,
        n_envs=n_envs,
        length=LENGTH,
        burn_in=BURN_IN,
        bootstrap_steps=1,
        latents={"state": (HIDDEN,)},
        time_first=True,
    )
    online, target = (
        QNetwork(env.observation_space, int(env.action_space.n), options.feed_forward).to(device) for _ in range(2)
    )
    obs: Any = env.reset()
    state = th.zeros(n_envs, HIDDEN, device=device)
    for network in (online, target):  # initializes the lazy layers
        network(th.as_tensor(obs, device=device)[None], state)
    target.load_state_dict(online.state_dict())
    optimizer = th.optim.Adam(online.parameters(), lr=1e-3)
    returns: deque[float] = deque(maxlen=100)
    rows, began, updates = [], time.perf_counter(), 0
    for step in (bar := tqdm(range(0, options.steps, n_envs), unit_scale=n_envs, unit="step")):
        with th.no_grad():
            values, states = online(th.as_tensor(obs, device=device)[None], state)
        explores = np.random.random(n_envs) < max(0.05, 1 - step / (0.4 * options.steps))
        random = np.random.randint(env.action_space.n, size=n_envs)
        actions = np.where(explores, random, values[0].argmax(1).cpu().numpy())
        next_obs, rewards, dones, infos = env.step(actions)
        reached = np.array(next_obs)
        for i in np.flatnonzero(dones):
            reached[i] = infos[i]["terminal_observation"]
        buffer.add(obs, reached, actions, rewards, dones, infos, latents={"state": state})
        obs, state = next_obs, states[0] * th.as_tensor(~dones, device=device)[:, None]
        returns.extend(info["episode"]["r"] for info in infos if "episode" in info)
        if step >= min(WARM_UP, options.steps // 2) and buffer.n_sequences:
            batch = buffer.sample(BATCH)
            loss, errors, counts, new_states = learn(batch, online, target)
            optimizer.zero_grad()
            th.autograd.backward(loss)
            nn.utils.clip_grad_norm_(online.parameters(), 10.0)
            optimizer.step()
            buffer.update_priorities(batch.sequences, errors, counts)
            buffer.update_latents(batch.positions[1:], {"state": new_states[:-1]})  # the state before each step
            updates += 1
            if updates % 100 == 0:
                target.load_state_dict(online.state_dict())
        if step // n_envs % 100 == 0 and returns:
            bar.set_postfix(mean_return=f"{np.mean(returns):.2f}", refresh=False)
            rows.append((step, round(time.perf_counter() - began, 1), round(float(np.mean(returns)), 3)))
    seconds = time.perf_counter() - began
    if options.curve is not None:
        with options.curve.open("w", newline="") as file:
            csv.writer(file).writerows([("steps", "seconds", "mean_return"), *rows])
    mean = f"mean return {np.mean(returns):.2f}" if returns else ""
    print(f"\n{options.steps:,} steps and {updates:,} updates in {seconds:.0f} s; last {len(returns)} episodes: {mean}")
    print(buffer.memory_usage())
    env.close()


if __name__ == "__main__":
    main()
