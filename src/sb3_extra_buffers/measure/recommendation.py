"""Which buffer to take, why, and the lines of code that take it."""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space

from sb3_extra_buffers.measure.comparison import Comparison, Result
from sb3_extra_buffers.measure.subjects import SB3, buffer_arguments
from sb3_extra_buffers.storage.choice import TIME_WEIGHT

_WORTH_IT = 1.5
"""Less of a gain in memory is not worth a change."""
_AS_FAST = 1.1
"""Within this factor two times are taken to be equal."""
_AS_GOOD = 1.25
"""Another method must cost so much less than ``auto`` to be preferred to it."""


@dataclass(frozen=True)
class Recommendation:
    result: Result
    reason: str
    code: str
    """Two lines to paste; empty where nothing needs to be changed."""


def recommend(comparison: Comparison) -> Recommendation:
    """The smallest of the buffers that are as fast as SB3's, or the best compromise where none is."""
    sb3, *ours = comparison.results
    worth = [result for result in ours if sb3.buffer_bytes / result.buffer_bytes >= _WORTH_IT]
    if not worth:
        best = max((sb3.buffer_bytes / result.buffer_bytes for result in ours), default=1.0)
        reason = f"no method makes it {_WORTH_IT:g} times smaller (the best: {best:.2f} times)"
        return Recommendation(sb3, reason, code="")
    fast = [result for result in worth if result.time <= _AS_FAST * sb3.time]
    if fast:
        smallest = min(fast, key=lambda result: result.buffer_bytes)
        chosen = _or_auto(smallest, fast)
        reason = f"it is {_gain(sb3, chosen)}, the smallest of those that are as fast as SB3's or faster"
        if chosen is not smallest:
            reason = f"it is {_gain(sb3, chosen)} and as fast or faster, and needs no settings"
            if chosen.buffer_bytes > _AS_GOOD * smallest.buffer_bytes:
                reason += f"; {smallest.subject} is smaller still ({_times(sb3, smallest)} times), but slower than this"
    else:
        chosen = _or_auto(min(worth, key=_cost), worth)
        reason = (
            f"it is {_gain(sb3, chosen)}; all that are smaller are slower than SB3's here, and this one is the best "
            f"compromise: an add and a sample take {chosen.time / sb3.time:.1f} times as long"
        )
    return Recommendation(chosen, reason, code_for(comparison, chosen.subject))


def code_for(comparison: Comparison, subject: str) -> str:
    """The two lines that take a buffer into use."""
    space, action_space = comparison.play.observation_space, comparison.play.action_space
    name = "CompressedDictReplayBuffer" if isinstance(space, spaces.Dict) else "CompressedReplayBuffer"
    if isinstance(space, spaces.Dict):
        policy = "MultiInputPolicy"
    else:
        policy = "CnnPolicy" if is_image_space(space) else "MlpPolicy"
    algorithm = "DQN" if isinstance(action_space, spaces.Discrete) else "SAC"
    arguments = buffer_arguments(subject)
    options = f", replay_buffer_kwargs={arguments}" if arguments else ""
    size = f"buffer_size={comparison.buffer_size:_}"
    return (
        f"from sb3_extra_buffers.compressed import {name}\n"
        f'model = {algorithm}("{policy}", env, {size}, replay_buffer_class={name}{options})'
    ).replace("'", '"')


def _or_auto(best: Result, candidates: list[Result]) -> Result:
    """``auto`` where it is as good: it needs no settings, and follows when the data changes."""
    for result in candidates:
        if result.subject == "auto" and _cost(result) <= _AS_GOOD * _cost(best):
            return result
    return best


def _cost(result: Result) -> float:
    """Memory weighed against time as ``auto`` weighs them."""
    return float(result.buffer_bytes * result.time**TIME_WEIGHT)


def _gain(sb3: Result, result: Result) -> str:
    return f"{_times(sb3, result)} times smaller than {SB3}"


def _times(sb3: Result, result: Result) -> str:
    return f"{sb3.buffer_bytes / result.buffer_bytes:,.1f}"
