"""Evaluate a model. Optionally, store the transitions in buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from stable_baselines3.common.vec_env import VecEnv
from tqdm import tqdm

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.training_utils.collection import AnyBuffer, Collector


class Evaluation(NamedTuple):
    """Episode returns, and the seconds spent in ``add`` of each buffer. ``print`` shows a summary."""

    returns: list[float]
    add_seconds: list[float]

    def __str__(self) -> str:
        lines = ["No episode ended"]
        if self.returns:
            low, first, median, third, high = np.percentile(self.returns, [0, 25, 50, 75, 100]).tolist()
            relative_iqr = f"{(third - first) / abs(median):.2f}" if median else "-"
            lines = [
                f"{len(self.returns)} episode{'s'[: len(self.returns) - 1]}, "
                f"mean return {np.mean(self.returns):.1f} ± {np.std(self.returns):.2f}",
                f"Q1: {first:g} | median: {median:g} | Q3: {third:g} | relative IQR: {relative_iqr} | "
                f"min: {low:g} | max: {high:g}",
            ]
        if self.add_seconds:
            lines.append(f"seconds in add: {' | '.join(f'{seconds:.3f}' for seconds in self.add_seconds)}")
        return "\n".join(lines)


def eval_model(
    n_eps: int,
    eval_env: VecEnv,
    model: Any,
    close_env: bool = True,
    buffer: AnyBuffer | Iterable[AnyBuffer] | None = None,
    *,
    deterministic: bool = True,
    progress: bool = True,
) -> Evaluation:
    """Play ``n_eps`` episodes, and report their returns.

    Every environment plays the same number of episodes, so that short ones do not count more than long ones. With SB3's
    ``Monitor``, which environments of ``make_env`` have, losing a life does not end an episode.

    :param n_eps: How many episodes to play.
    :param eval_env: The environments.
    :param model: An SB3 model, or anything with its ``predict``.
    :param close_env: Whether to close the environments at the end.
    :param buffer: Also store the transitions, as SB3 would, in a replay or record buffer, or in several. A buffer for
        fewer environments stores the first ones.
    :param deterministic: Whether the model takes its best action instead of sampling one.
    :param progress: Whether to show a progress bar.
    """
    if n_eps < 1:
        raise ConfigurationError(f"n_eps must be at least 1, not {n_eps}.")
    n_envs = eval_env.num_envs
    remaining = [(n_eps + i) // n_envs for i in range(n_envs)]
    returns: list[float] = []
    try:
        collector = Collector(eval_env, model, deterministic, buffer)
        with tqdm(total=n_eps, unit="episode", disable=not progress) as bar:
            while len(returns) < n_eps:
                collector.step()
                for env, episode_return in collector.episode_returns.items():
                    if remaining[env]:
                        remaining[env] -= 1
                        returns.append(episode_return)
                        bar.set_postfix(mean=f"{np.mean(returns):.1f}", refresh=False)
                        bar.update()
    finally:
        if close_env:
            eval_env.close()
    return Evaluation(returns, collector.add_seconds)
