"""Fill buffers before training starts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from stable_baselines3.common.vec_env import VecEnv
from tqdm import tqdm

from sb3_extra_buffers.compatibility import serve_old_names
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.training_utils.collection import AnyBuffer, Collector, end_episodes
from sb3_extra_buffers.training_utils.eval_model import Evaluation

serve_old_names(__name__)


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
    """Let a model play, and store the transitions exactly as SB3 would. The environment stays open.

    Playing stops when all buffers are full, or after the given number of episodes.

    :param buffer: What to fill, one buffer or several.
    :param n_envs: How many environments the buffers are for.
    :param warmup_env: At least ``n_envs`` environments.
    :param warmup_model: An SB3 model, or anything with its ``predict``.
    :param warmup_episodes: After how many episodes to stop.
    :param mean_ep_len: Mean length of an episode. Without ``warmup_episodes``, play as many as should fill the buffers.
    :param deterministic: Whether the model takes its best action instead of sampling one.
    :param progress: Whether to show a progress bar.
    :return: The returns of the episodes that ended, and the seconds spent in ``add`` of each buffer.
    """
    if not 1 <= n_envs <= warmup_env.num_envs:
        raise ConfigurationError(
            f"n_envs must be from 1 to {warmup_env.num_envs}, the number of environments, not {n_envs}."
        )
    if any(limit is not None and limit <= 0 for limit in (warmup_episodes, mean_ep_len)):
        raise ConfigurationError(
            f"warmup_episodes and mean_ep_len must be positive, not {warmup_episodes} and {mean_ep_len}."
        )
    collector = Collector(warmup_env, warmup_model, deterministic, buffer)
    capacity = max((writer.capacity for writer in collector.writers), default=0)
    if capacity == 0:
        raise ConfigurationError("There is no buffer to fill. Pass a replay or record buffer.")
    max_episodes = math.inf if warmup_episodes is None else warmup_episodes
    if warmup_episodes is None and mean_ep_len is not None:
        max_episodes = math.ceil(capacity * warmup_env.num_envs / mean_ep_len)
    returns: list[float] = []
    with tqdm(total=capacity * n_envs, unit="transition", disable=not progress) as bar:
        while len(returns) < max_episodes and not all(writer.is_full for writer in collector.writers):
            collector.step()
            returns.extend(collector.episode_returns.values())
            bar.set_postfix(episodes=len(returns), refresh=False)
            bar.update(n_envs)
    for writer in collector.writers:
        end_episodes(writer.buffer)
    return Evaluation(returns, collector.add_seconds)
