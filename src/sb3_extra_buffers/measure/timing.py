"""Time of ``add`` and ``sample``, buffers taking turns so that what disturbs the machine disturbs them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from stable_baselines3.common.buffers import ReplayBuffer
from tqdm import tqdm

Times = dict[str, dict[str, float]]
"""Microseconds of ``"add"`` and, for each batch size, of ``"sample(32)"``, by subject."""


def time_replay_buffers(
    buffers: Mapping[str, ReplayBuffer],
    transitions: Iterable[Sequence[Any]],
    steps: int,
    batch_sizes: Sequence[int],
    repeats: int,
) -> Times:
    """Fill the buffers, then sample from them: the mean of ``add`` and the median of ``repeats`` samples of each size.

    ``add`` is a mean, without its slowest hundredth, because codecs work in bursts: one record every so many steps.
    """
    spent: dict[str, dict[str, list[float]]] = {subject: {"add": []} for subject in buffers}
    order = list(buffers)
    for transition in tqdm(transitions, "add", total=steps, unit="step"):
        order.append(order.pop(0))
        for subject in order:
            spent[subject]["add"].append(microseconds(buffers[subject].add, *transition))
    for batch_size in batch_sizes:
        for repeat in tqdm(range(repeats), f"sample({batch_size})"):
            order.append(order.pop(0))
            for subject in order:
                np.random.seed(repeat)
                elapsed = microseconds(buffers[subject].sample, batch_size)
                spent[subject].setdefault(f"sample({batch_size})", []).append(elapsed)
    return {
        subject: {
            name: statistics.fmean(_without_outliers(values)) if name == "add" else statistics.median(values)
            for name, values in times.items()
        }
        for subject, times in spent.items()
    }


def microseconds(work: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    work(*arguments)
    return 1e6 * (time.perf_counter() - began)


def _without_outliers(values: list[float]) -> list[float]:
    """Without the slowest hundredth, in which other processes took the core."""
    return sorted(values)[: max(1, len(values) * 99 // 100)]
