"""Breakout on a torch device: thousands of games step together, with stacks of four 84×84 frames as observations.

``example_train_on_device.py`` trains on it with ``on_device``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.utils import get_device

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.training_utils.device_env import DeviceStep

SIZE = 84
STACK = 4
BALL = 3
PADDLE_WIDTH, PADDLE_HEIGHT, PADDLE_Y, PADDLE_SPEED = 15, 3, 78, 4
ROWS, COLUMNS = 6, 14
BRICK_HEIGHT, BRICK_WIDTH, BRICKS_Y = 3, SIZE // COLUMNS, 15
LAST_X = SIZE - BALL
STAY, LEFT, RIGHT = range(3)
_PADDLE_START = (SIZE - PADDLE_WIDTH) // 2
_SERVE_Y = 42
_SPEED = 3
"""Vertical speed of the ball, in pixels per step. At most the height of a brick, so that the ball cannot skip one."""

_STATE = ("_keys", "_episodes", "_steps", "_bricks", "_paddle", "_x", "_y", "_speed_x", "_speed_y", "_stack")


class DeviceBreakout:
    """Breakout with one life: +1 for each brick. The game ends when the ball is lost or no brick is left.

    All state is integer, so games are the same on every device. With a seed, environment ``i`` plays the same games as
    a single environment with ``seed + i``. No method waits for the device.

    :param num_envs: Number of games.
    :param device: The torch device to run them on.
    :param seed: Determines where and in which direction the ball starts. ``reset`` can set a new one.
    :param max_episode_steps: Truncate games after this many steps; ``None`` for no limit.
    :param cuda_graph: On a GPU, capture a step as a CUDA graph and replay it. The results are the same.
    """

    def __init__(
        self,
        num_envs: int,
        device: th.device | str = "auto",
        seed: int = 0,
        max_episode_steps: int | None = 2_000,
        cuda_graph: bool = True,
    ) -> None:
        if num_envs < 1:
            raise ConfigurationError(f"num_envs must be at least 1, not {num_envs}.")
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ConfigurationError(f"max_episode_steps must be at least 1, not {max_episode_steps}.")
        self.num_envs = num_envs
        self.device = get_device(device)
        self.max_episode_steps = max_episode_steps
        self.observation_space: spaces.Space[Any] = spaces.Box(0, 255, (STACK, SIZE, SIZE), np.uint8)
        self.action_space: spaces.Space[Any] = spaces.Discrete(3)
        self._pixels = th.arange(SIZE, device=self.device)
        shades = th.arange(ROWS, device=self.device, dtype=th.uint8) * 16 + 80
        self._shades = shades.repeat_interleave(BRICK_HEIGHT)[:, None]
        self._places = th.arange(ROWS * COLUMNS, device=self.device)
        # All games start with this observation. _with_new_games adds the ball.
        self._first_obs = th.zeros((1, STACK, SIZE, SIZE), dtype=th.uint8, device=self.device)
        self._first_obs[:, -1, BRICKS_Y : BRICKS_Y + ROWS * BRICK_HEIGHT] = self._shades
        self._first_obs[:, -1, PADDLE_Y : PADDLE_Y + PADDLE_HEIGHT, _PADDLE_START : _PADDLE_START + PADDLE_WIDTH] = 200
        self._uses_graph = cuda_graph and self.device.type == "cuda"
        self._graph: th.cuda.CUDAGraph | None = None
        self.reset(seed)

    def reset(self, seed: int | None = None) -> th.Tensor:
        """Start new games. The same seed gives the same games; without a seed, every reset gives different ones."""
        if seed is not None:
            self._keys = _hash(th.arange(self.num_envs, device=self.device) + seed)
            self._episodes = th.zeros(self.num_envs, dtype=th.int64, device=self.device)
        self._bricks = th.ones((self.num_envs, ROWS * COLUMNS), dtype=th.bool, device=self.device)
        self._steps = th.zeros_like(self._episodes)
        self._paddle = th.full_like(self._episodes, _PADDLE_START)
        self._x, self._y, self._speed_x, self._speed_y = self._serve()
        self._episodes = self._episodes + 1
        started = th.ones_like(self._bricks[:, 0])
        self._stack = self._with_new_games(self._first_obs, started)
        return self._stack

    def step(self, actions: th.Tensor) -> DeviceStep:
        if actions.shape[:1] != (self.num_envs,) or actions.numel() != self.num_envs:
            raise ConfigurationError(f"There must be {self.num_envs} actions, not a tensor of {tuple(actions.shape)}.")
        if not self._uses_graph:
            return self._step(actions.reshape(-1))
        if self._graph is None:
            self._graph = self._capture()
        for name, kept in self._kept.items():
            current = getattr(self, name)
            if current is not kept:  # after a reset
                kept.copy_(current)
                setattr(self, name, kept)
        self._actions.copy_(actions.reshape(-1))
        self._graph.replay()
        return DeviceStep(*(part.clone() for part in self._result))

    def _capture(self) -> th.cuda.CUDAGraph:
        """A step as a CUDA graph: one launch instead of a hundred. The graph always uses the same memory."""
        self._actions = th.zeros(self.num_envs, dtype=th.int64, device=self.device)
        self._kept = {name: getattr(self, name).clone() for name in _STATE}
        before = {name: getattr(self, name) for name in _STATE}
        stream = th.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(th.cuda.current_stream(self.device))
        with th.cuda.stream(stream):  # torch requires a run before the capture
            self._step(self._actions)
        th.cuda.current_stream(self.device).wait_stream(stream)
        vars(self).update(self._kept)
        graph = th.cuda.CUDAGraph()
        with th.cuda.graph(graph):
            self._result = self._step(self._actions)
            for name, kept in self._kept.items():
                if getattr(self, name) is not kept:
                    kept.copy_(getattr(self, name))
        vars(self).update(before)
        return graph

    def _step(self, actions: th.Tensor) -> DeviceStep:
        move = PADDLE_SPEED * ((actions == RIGHT).long() - (actions == LEFT).long())
        self._paddle = (self._paddle + move).clamp(0, SIZE - PADDLE_WIDTH)
        rewards = self._move_ball()
        self._steps = self._steps + 1
        terminated = (self._y >= SIZE - BALL) | ~self._bricks.any(1)
        truncated = th.zeros_like(terminated)
        if self.max_episode_steps is not None:
            truncated = ~terminated & (self._steps >= self.max_episode_steps)
        final_obs = th.cat([self._stack[:, 1:], self._frames()[:, None]], 1)
        ended = terminated | truncated
        self._restart(ended)
        self._stack = self._with_new_games(final_obs, ended)
        return DeviceStep(self._stack, rewards, terminated, truncated, final_obs)

    def _move_ball(self) -> th.Tensor:
        """Move the ball by one step. It bounces off walls, bricks and the paddle. Returns 1 where it hit a brick."""
        x, speed_x = self._x + self._speed_x, self._speed_x
        outside = (x < 0) | (x > LAST_X)
        x = th.where(x < 0, -x, th.where(x > LAST_X, 2 * LAST_X - x, x))
        speed_x = th.where(outside, -speed_x, speed_x)
        y, speed_y = self._y + self._speed_y, self._speed_y
        speed_y = th.where(y < 0, -speed_y, speed_y)
        y = y.abs()

        row = (y + BALL // 2 - BRICKS_Y).div(BRICK_HEIGHT, rounding_mode="floor")
        column = (x + BALL // 2).div(BRICK_WIDTH, rounding_mode="floor")
        # Above or below the bricks, row * COLUMNS + column is not a valid brick number, so nothing is hit.
        struck = self._bricks & (self._places == (row * COLUMNS + column)[:, None])
        self._bricks = self._bricks & ~struck
        hit = struck.any(1)
        y = th.where(hit, self._y, y)
        speed_y = th.where(hit, -speed_y, speed_y)

        offset = x + BALL // 2 - (self._paddle + PADDLE_WIDTH // 2)
        reach = PADDLE_WIDTH // 2 + BALL // 2
        crosses = (self._y + BALL <= PADDLE_Y) & (y + BALL >= PADDLE_Y) & (speed_y > 0)
        caught = crosses & (offset.abs() <= reach)
        y = y.masked_fill(caught, PADDLE_Y - BALL)
        speed_y = th.where(caught, -speed_y, speed_y)
        # The point of impact on the paddle sets the direction, so that a player can aim at every brick.
        aimed = offset.div(2, rounding_mode="trunc").clamp(-_SPEED, _SPEED)
        self._speed_x = th.where(caught, th.where(aimed == 0, speed_x.sign(), aimed), speed_x)
        self._x, self._y, self._speed_y = x, y, speed_y
        return hit.float()

    def _restart(self, ended: th.Tensor) -> None:
        """Replace the games that have ended by new ones."""
        served = self._serve()
        self._x, self._y, self._speed_x, self._speed_y = (
            th.where(ended, new, old)
            for new, old in zip(served, (self._x, self._y, self._speed_x, self._speed_y), strict=True)
        )
        self._paddle = self._paddle.masked_fill(ended, _PADDLE_START)
        self._bricks = self._bricks | ended[:, None]
        self._steps = self._steps.masked_fill(ended, 0)
        self._episodes = self._episodes + ended.long()

    def _serve(self) -> tuple[th.Tensor, ...]:
        """Start position and speed of the ball in each environment's next game."""
        number = _hash(self._keys + self._episodes)
        x = number % (LAST_X + 1)
        speed_x = (number // 128) % 5 - 2
        return x, th.full_like(x, _SERVE_Y), speed_x, th.full_like(x, _SPEED)

    def _frames(self) -> th.Tensor:
        """Draw the current frames: ``uint8``, (environments, 84, 84)."""
        bricks = self._bricks.view(-1, ROWS, 1, COLUMNS, 1).expand(-1, -1, BRICK_HEIGHT, -1, BRICK_WIDTH)
        frames = th.zeros((self.num_envs, SIZE, SIZE), dtype=th.uint8, device=self.device)
        frames[:, BRICKS_Y : BRICKS_Y + ROWS * BRICK_HEIGHT] = (
            bricks.reshape(-1, ROWS * BRICK_HEIGHT, SIZE) * self._shades
        )
        paddle = _covered(self._pixels, self._paddle, PADDLE_WIDTH).to(th.uint8) * 200
        frames[:, PADDLE_Y : PADDLE_Y + PADDLE_HEIGHT] = paddle[:, None]
        ball = _covered(self._pixels, self._y, BALL)[:, :, None] & _covered(self._pixels, self._x, BALL)[:, None, :]
        return frames.masked_fill_(ball, 255)

    def _with_new_games(self, obs: th.Tensor, started: th.Tensor) -> th.Tensor:
        """Replace the observations of games that have just started: empty frames, then the first frame of the game."""
        obs = th.where(started[:, None, None, None], self._first_obs, obs)
        ball = _covered(self._pixels, self._x, BALL).to(th.uint8) * 255
        lines = obs[:, -1, _SERVE_Y : _SERVE_Y + BALL]  # at the start, only the ball is on these lines
        lines.copy_(th.where(started[:, None, None], ball[:, None], lines))
        return obs


def _covered(pixels: th.Tensor, start: th.Tensor, length: int) -> th.Tensor:
    """For each environment, a mask of the pixels in ``[start, start + length)``."""
    distance = pixels - start[:, None]
    return (distance >= 0) & (distance < length)


def _hash(numbers: th.Tensor) -> th.Tensor:
    """Pseudo-random 31-bit numbers, the same on every device."""
    numbers = (numbers * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF
    numbers = ((numbers ^ (numbers >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    numbers = ((numbers ^ (numbers >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return (numbers ^ (numbers >> 16)) & 0x7FFFFFFF
