"""Fill buffers before training starts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.her import HerReplayBuffer
from tqdm import tqdm

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.training_utils.collection import AnyBuffer, Player, feeders_for
from sb3_extra_buffers.training_utils.eval_model import Evaluation


def warm_up(
    buffer: AnyBuffer | Iterable[AnyBuffer],
    n_envs: int,
    warmup_env: VecEnv,
    warmup_model: Any,
    warmup_episodes: int | None = None,
    mean_ep_len: float | None = None,
    *,
    deterministic: bool = False,
    progress: bool = True,
) -> Evaluation:
    """Let a model play and store what happens, exactly as SB3 would. The environment stays open.

    It ends when all buffers are full, or before, after as many episodes as are asked for.

    :param buffer: What to fill, one buffer or several.
    :param n_envs: How many environments the buffers are for.
    :param warmup_env: Where to play, with as many environments or more.
    :param warmup_model: A model of SB3, or anything with its ``predict``.
    :param warmup_episodes: After how many episodes to stop.
    :param mean_ep_len: Steps of an episode. Without ``warmup_episodes``, play as many as should fill the buffers.
    :param deterministic: Whether the model always takes the action that it thinks best.
    :param progress: Whether to show a progress bar.
    :return: The returns of the episodes that ended, and the seconds spent in ``add`` of each buffer.
    """
    if not 1 <= n_envs <= warmup_env.num_envs:
        raise ConfigurationError(f"n_envs must be from 1 to the {warmup_env.num_envs} of warmup_env, not {n_envs}.")
    if any(limit is not None and limit <= 0 for limit in (warmup_episodes, mean_ep_len)):
        raise ConfigurationError(
            f"warmup_episodes and mean_ep_len must be positive, not {warmup_episodes} and {mean_ep_len}."
        )
    player = Player(warmup_env, warmup_model, deterministic)
    feeders = feeders_for(buffer, player)
    capacity = max((feeder.capacity for feeder in feeders), default=0)
    if capacity == 0:
        raise ConfigurationError("There is no buffer to fill. Pass a replay, rollout or record buffer.")
    most_episodes = math.inf if warmup_episodes is None else warmup_episodes
    if warmup_episodes is None and mean_ep_len is not None:
        most_episodes = math.ceil(capacity * n_envs / mean_ep_len)
    returns: list[float] = []
    with tqdm(total=capacity * n_envs, unit="transition", disable=not progress) as bar:
        while len(returns) < most_episodes and not all(feeder.is_full for feeder in feeders):
            step = player.step()
            for feeder in feeders:
                feeder.feed(step)
            returns.extend(step.episodes.values())
            bar.set_postfix(episodes=len(returns), refresh=False)
            bar.update(n_envs)
    for feeder in feeders:
        _end_trajectories(feeder.buffer)
    return Evaluation(returns, [feeder.seconds for feeder in feeders])


def _end_trajectories(buffer: Any) -> None:
    """Training starts new episodes: buffers that look across steps must not join them to those broken off here."""
    if isinstance(buffer, HerReplayBuffer):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of what is wanted here
            buffer.truncate_last_trajectory()
    elif isinstance(buffer, NStepReplayBuffer):
        newest = buffer.pos - 1
        buffer.timeouts[newest] = np.logical_or(buffer.timeouts[newest], np.logical_not(buffer.dones[newest]))
