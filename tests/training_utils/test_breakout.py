"""Breakout on a device: the rules, and that games do not depend on each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch as th

import device_breakout as breakout
from device_breakout import LEFT, RIGHT, STAY, DeviceBreakout
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.training_utils.device_env import DeviceStep

DEVICES = ["cpu", *(["cuda"] if th.cuda.is_available() else [])]


def play(env: DeviceBreakout, n: int, seed: int = 0) -> list[DeviceStep]:
    """Random actions, the same for environments of the same number."""
    actions = np.random.default_rng(seed).integers(0, 3, (n, 64))
    return [env.step(th.as_tensor(row[: env.num_envs], device=env.device)) for row in actions]


def follow(obs: th.Tensor) -> th.Tensor:
    """Actions that keep the paddle below the ball."""
    newest = obs[:, -1].long()
    ball = (newest == 255).any(1).float().argmax(1)
    paddle = (newest[:, breakout.PADDLE_Y + 1] == 200).float().argmax(1) + breakout.PADDLE_WIDTH // 2
    distance = ball + 1 - paddle
    return th.where(distance.abs() < 3, STAY, th.where(distance < 0, LEFT, RIGHT))


@pytest.mark.parametrize("device", DEVICES)
def test_observations(device: str) -> None:
    env = DeviceBreakout(5, device)
    obs = env.reset()
    assert obs.shape == (5, 4, 84, 84)
    assert obs.dtype == th.uint8
    assert not obs[:, :3].any(), "the stack starts with empty frames"
    last = obs[:, 3].cpu()
    assert ((last == 255).sum((1, 2)) == breakout.BALL**2).all()
    assert ((last == 200).sum((1, 2)) == breakout.PADDLE_WIDTH * breakout.PADDLE_HEIGHT).all()
    for one in obs.cpu().numpy():
        assert env.observation_space.contains(one)
    before = obs
    for step in play(env, 4):
        assert th.equal(step.final_obs[:, :3], before[:, 1:])
        before = step.obs
    assert before.shape == (5, 4, 84, 84)


def test_first_frames_are_like_all_others() -> None:
    """They are put together in another way."""
    env = DeviceBreakout(5, "cpu")
    assert th.equal(env.reset(1)[:, -1], env._frames())
    for _ in range(60):
        ended = env.step(th.zeros(5, dtype=th.int64))
        assert th.equal(ended.obs[:, -1], env._frames())


def test_bricks_give_rewards_and_vanish() -> None:
    env = DeviceBreakout(8, "cpu", max_episode_steps=None)
    obs, bricks, total = env.reset(), env._bricks.sum().item(), 0.0
    for _ in range(400):
        step = env.step(follow(obs))
        obs = step.obs
        total += step.rewards.sum().item()
        if not step.terminated.any():
            assert env._bricks.sum().item() == bricks - total
        else:
            break
    assert total > 80, "a player that follows the ball hits a brick again and again"
    obs = env.reset()
    assert (obs[:, -1, breakout.BRICKS_Y : breakout.BRICKS_Y + 18] > 0).all()


def test_automatic_reset() -> None:
    env = DeviceBreakout(6, "cpu", max_episode_steps=17)
    n_terminated = n_truncated = 0
    for step in play(env, 80):
        ended = step.terminated | step.truncated
        assert not (step.terminated & step.truncated).any()
        assert th.equal(step.obs[~ended], step.final_obs[~ended])
        assert not step.obs[ended][:, :3].any()
        assert step.final_obs[ended][:, 2].any(1).any(1).all(), "the terminal observation is that of the old episode"
        n_terminated, n_truncated = n_terminated + step.terminated.sum(), n_truncated + step.truncated.sum()
    assert n_terminated
    assert n_truncated
    assert env._steps.max() <= 17


@pytest.mark.parametrize("device", DEVICES)
def test_seeds(device: str) -> None:
    first, again, other = (DeviceBreakout(4, device, seed=seed) for seed in (3, 9, 4))
    again.reset(3)
    first.reset(3)
    other.reset(4)
    games = [play(env, 60) for env in (first, again, other)]
    assert all(th.equal(a.obs, b.obs) for a, b in zip(*games[:2], strict=True))
    assert not all(th.equal(a.obs, b.obs) for a, b in zip(games[0], games[2], strict=True))
    obs = first.reset()
    assert not th.equal(obs, first.reset()), "without a seed, games go on to differ"


@pytest.mark.parametrize("device", DEVICES)
def test_one_and_many_environments_play_the_same_games(device: str) -> None:
    many = play(DeviceBreakout(5, device, seed=10, max_episode_steps=30), 80)
    assert any(step.terminated.any() for step in many)
    actions = np.random.default_rng(0).integers(0, 3, (80, 64))
    for i in range(5):
        one = DeviceBreakout(1, "cpu", seed=10 + i, max_episode_steps=30)
        for step, row in zip(many, actions, strict=True):
            alone = one.step(th.as_tensor(row[i : i + 1]))
            for part, expected in zip(alone, step, strict=True):
                assert th.equal(part[0], expected[i].cpu())


def test_bad_arguments() -> None:
    with pytest.raises(ConfigurationError, match="num_envs must be at least 1, not 0"):
        DeviceBreakout(0)
    with pytest.raises(ConfigurationError, match="max_episode_steps must be at least 1, not 0"):
        DeviceBreakout(1, max_episode_steps=0)
    with pytest.raises(ConfigurationError, match="There must be 3 actions"):
        DeviceBreakout(3, "cpu").step(th.zeros(2, dtype=th.int64))
