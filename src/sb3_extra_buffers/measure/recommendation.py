"""Which buffer to use, why, and the lines of code for it."""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space

from sb3_extra_buffers.measure.buffers import buffer_arguments, buffer_class
from sb3_extra_buffers.measure.comparison import Comparison, Result
from sb3_extra_buffers.storage.choice import TIME_WEIGHT

_MIN_RATIO, _MIN_RATIO_IF_SLOWER = 1.5, 3.0
"""A smaller saving of memory is not worth a change, or not worth a slower buffer."""
_SAME_SPEED = 1.1
"""Two times within this factor count as equal."""
_AUTO_TOLERANCE = 1.25
"""Another method must be better than ``auto`` by this factor to be preferred to it."""


@dataclass(frozen=True)
class Recommendation:
    result: Result
    text: str
    """One or two sentences: what to use, and what that gives."""
    code: str
    """Two lines to paste; empty if SB3's buffer is the best."""


def recommend(comparison: Comparison) -> Recommendation:
    """The smallest of the buffers that are as fast as SB3's; if none is, the best compromise."""
    sb3, *ours = comparison.results
    as_fast = [result for result in ours if result.time <= _SAME_SPEED * sb3.time]
    fast = [result for result in as_fast if sb3.buffer_bytes >= _MIN_RATIO * result.buffer_bytes]
    candidates = fast or [result for result in ours if sb3.buffer_bytes >= _MIN_RATIO_IF_SLOWER * result.buffer_bytes]
    if not candidates:
        smallest = min(comparison.results, key=lambda result: result.buffer_bytes)
        memory, speed = smallest.buffer_bytes / sb3.buffer_bytes, sb3.time / smallest.time
        text = (
            "keep SB3's ReplayBuffer. Compression does not pay off here: the smallest method still needs "
            f"{memory:.2f}x SB3's memory, at {speed:.2f}x its speed."
        )
        return Recommendation(sb3, text, code="")
    best = min(candidates, key=(lambda result: result.buffer_bytes) if fast else _cost)
    chosen = _auto_if_as_good(best, candidates)
    text = f"{_class_name(comparison)} with {_settings(chosen)}: {_gain(sb3, chosen)}."
    if not fast:
        text += " All methods that save memory are slower than SB3's buffer here; this is the best compromise."
    elif chosen.buffer_bytes > _AUTO_TOLERANCE * best.buffer_bytes:
        text += f" {best.method} needs even less ({_ratio(sb3, best)} less than SB3's), but is slower than this."
    return Recommendation(chosen, text, _code(comparison, chosen.method))


def _code(comparison: Comparison, method: str) -> str:
    """The two lines that use the buffer."""
    space, class_name = comparison.data.observation_space, _class_name(comparison)
    if isinstance(space, spaces.Dict):
        policy = "MultiInputPolicy"
    else:
        policy = "CnnPolicy" if is_image_space(space) else "MlpPolicy"
    algorithm = "DQN" if isinstance(comparison.data.action_space, spaces.Discrete) else "SAC"
    arguments = buffer_arguments(method)
    options = f", replay_buffer_kwargs={arguments}" if arguments else ""
    return (
        f"from sb3_extra_buffers.compressed import {class_name}\n"
        f'model = {algorithm}("{policy}", env, buffer_size={comparison.buffer_size:_}, '
        f"replay_buffer_class={class_name}{options})"
    ).replace("'", '"')


def _class_name(comparison: Comparison) -> str:
    return str(buffer_class("Replay", comparison.data.observation_space, compressed=True).__name__)


def _auto_if_as_good(best: Result, candidates: list[Result]) -> Result:
    """Prefer ``auto``: it needs no settings, and adapts when the data changes."""
    for result in candidates:
        if result.method == "auto" and _cost(result) <= _AUTO_TOLERANCE * _cost(best):
            return result
    return best


def _cost(result: Result) -> float:
    """Memory and time, weighed as ``auto`` weighs them."""
    return float(result.buffer_bytes * result.time**TIME_WEIGHT)


def _settings(result: Result) -> str:
    return "the default settings" if result.method == "auto" else f"the method {result.method!r}"


def _gain(sb3: Result, result: Result) -> str:
    speed = sb3.time / result.time
    about = "about " if 1 / _SAME_SPEED <= speed <= _SAME_SPEED else ""
    shared = " (frames are shared, not compressed)" if result.memory.codec.split()[0] == "none" else ""
    return f"{_ratio(sb3, result)} less memory{shared} at {about}{speed:.2f}x SB3's speed"


def _ratio(sb3: Result, result: Result) -> str:
    return f"{sb3.buffer_bytes / result.buffer_bytes:,.1f}x"
