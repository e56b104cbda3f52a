"""Recommend a buffer, with the reason and code to paste."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.measure.buffers import SB3, buffer_arguments
from sb3_extra_buffers.measure.comparison import Comparison, Result
from sb3_extra_buffers.measure.environments import SUPPORTED_SPACES
from sb3_extra_buffers.storage.choice import TIME_WEIGHT

_ALGORITHMS: dict[str, tuple[Literal["Replay", "Rollout"], tuple[type[spaces.Space[Any]], ...]]] = {
    "dqn": ("Replay", (spaces.Discrete,)),
    "sac": ("Replay", (spaces.Box,)),
    "td3": ("Replay", (spaces.Box,)),
    "ppo": ("Rollout", SUPPORTED_SPACES),
    "a2c": ("Rollout", SUPPORTED_SPACES),
}
"""For each algorithm, the kind of its buffer and the action spaces that it supports."""
_MIN_CNN_SIDE = 36
"""In pixels. SB3's CnnPolicy cannot process smaller images."""

_MIN_RATIO, _MIN_RATIO_IF_SLOWER = 1.5, 3.0
"""Minimum ratio of SB3's memory to ours for a recommendation: in general, and if ours is slower."""
_NOISE_FACTOR = 1.05
"""Measurements within this factor count as equal, because the next run may order them differently."""
_AUTO_TOLERANCE = 1.25
"""Another method is preferred to ``auto`` only if it is better by this factor."""


@dataclass(frozen=True)
class Recommendation:
    result: Result
    text: str
    """One or two sentences: which buffer to use, and why."""
    code: str
    """Lines to paste; empty if SB3's buffer is recommended."""


def choose_algorithm(action_space: spaces.Space[Any], wanted: str | None = None) -> str:
    """The wanted algorithm if it supports the action space; by default the first one that does."""
    fitting = [name for name, (_, actions) in _ALGORITHMS.items() if isinstance(action_space, actions)]
    if wanted is not None and wanted not in fitting:
        raise ConfigurationError(
            f"{wanted.upper()} does not support {type(action_space).__name__} actions. "
            f"Use --algo {', '.join(fitting[:-1])} or {fitting[-1]}."
        )
    return wanted or fitting[0]


def buffer_kind(algorithm: str) -> Literal["Replay", "Rollout"]:
    return _ALGORITHMS[algorithm][0]


def recommend(comparison: Comparison, algorithm: str = "dqn") -> Recommendation:
    """Pick the smallest buffer that is as fast as SB3's; if there is none, the best compromise."""
    sb3, *ours = comparison.results
    as_fast = [result for result in ours if result.time <= _NOISE_FACTOR * sb3.time]
    fast = [result for result in as_fast if sb3.buffer_bytes >= _MIN_RATIO * result.buffer_bytes]
    candidates = fast or [result for result in ours if sb3.buffer_bytes >= _MIN_RATIO_IF_SLOWER * result.buffer_bytes]
    if not candidates:
        smallest = min(ours, key=lambda result: result.buffer_bytes)
        memory, speed = smallest.buffer_bytes / sb3.buffer_bytes, sb3.time / smallest.time
        text = (
            f"keep SB3's {comparison.task.class_name(SB3)}. Compression does not pay off here: the smallest method, "
            f"{smallest.method}, needs {memory:.2f}x SB3's memory at {speed:.2f}x its speed."
        )
        return Recommendation(sb3, text, code="")
    best = _first_of_equals(min(candidates, key=(lambda result: result.buffer_bytes) if fast else _cost), candidates)
    chosen = next((r for r in candidates if r.method == "auto" and _cost(r) <= _AUTO_TOLERANCE * _cost(best)), best)
    settings = "the default settings" if chosen.method == "auto" else f"the method {chosen.method!r}"
    text = f"{comparison.task.class_name(chosen.method)} with {settings}: {_gain(sb3, chosen)}."
    if not fast:
        text += " All methods that save memory are slower than SB3's buffer here; this is the best compromise."
    elif chosen.buffer_bytes > _AUTO_TOLERANCE * best.buffer_bytes:
        text += f" {best.method} uses even less memory ({_ratio(sb3, best)} less than SB3), but is slower."
    return Recommendation(chosen, text, _code(comparison, chosen.method, algorithm))


def _first_of_equals(best: Result, candidates: list[Result]) -> Result:
    """The first result, in the order of the table, that is as good as the best within noise."""
    return next(
        result
        for result in candidates
        if result.buffer_bytes <= _NOISE_FACTOR * best.buffer_bytes and result.time <= _NOISE_FACTOR * best.time
    )


def _code(comparison: Comparison, method: str, algorithm: str) -> str:
    """Lines that create a model with the buffer."""
    task = comparison.task
    kind, class_name, arguments = task.kind.lower(), task.class_name(method), buffer_arguments(method)
    options = {"buffer_size": f"{comparison.buffer_size:_}"}
    if task.kind == "Rollout":
        options = {"n_steps": str(max(1, comparison.buffer_size // task.n_envs))}
    options[f"{kind}_buffer_class"] = class_name
    if arguments:
        options[f"{kind}_buffer_kwargs"] = repr(arguments).replace("'", '"')
    listed = ", ".join(f"{name}={value}" for name, value in options.items())
    return (
        f"from sb3_extra_buffers import {class_name}\n"
        f"from stable_baselines3 import {algorithm.upper()}\n\n"
        f'model = {algorithm.upper()}("{policy_name(task.observation_space)}", env, {listed})'
    )


def policy_name(space: spaces.Space[Any]) -> str:
    """The SB3 policy for an observation space with images channels first."""
    if isinstance(space, spaces.Dict):
        return "MultiInputPolicy"
    fits = is_image_space(space) and min((space.shape or ())[1:]) >= _MIN_CNN_SIDE
    return "CnnPolicy" if fits else "MlpPolicy"


def _cost(result: Result) -> float:
    """Memory and time, weighted as by ``auto``; lower is better."""
    return float(result.buffer_bytes * result.time**TIME_WEIGHT)


def _gain(sb3: Result, result: Result) -> str:
    speed = sb3.time / result.time
    at_speed = (
        f"about SB3's speed ({speed:.2f}x)"
        if 1 / _NOISE_FACTOR <= speed <= _NOISE_FACTOR
        else f"{speed:.2f}x SB3's speed"
    )
    shared = " (frames are shared, not compressed)" if result.memory.codec.split()[0] == "none" else ""
    return f"{_ratio(sb3, result)} less memory{shared} at {at_speed}"


def _ratio(sb3: Result, result: Result) -> str:
    return f"{sb3.buffer_bytes / result.buffer_bytes:,.1f}x"
