"""The replay buffers that are compared: SB3's own, and ours with each method.

A method is written as for ``compression_method``. After it, ``xN`` means ``frames_per_record=N`` and ``indexed`` means
``indexed_colour=True``, as in ``"zstd-dict/9 x8"``.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from stable_baselines3.common import buffers as sb3_buffers
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape, is_image_space

from sb3_extra_buffers import compressed as compressed_buffers
from sb3_extra_buffers.codecs.base import FrameSpec
from sb3_extra_buffers.codecs.registry import AUTO, available_methods, create_codec, parse_method
from sb3_extra_buffers.errors import ConfigurationError

SB3 = "SB3 ReplayBuffer"
"""Stands for SB3's own buffer where a method is expected."""
_DEFAULT = (AUTO, "delta", "zstd-dict/3", "zstd-dict/9 x8", "zstd-5", "lz4-frame/1", "igzip1", "gzip1", "none")
_DEFAULT_RGB = ("zstd-dict/9 x8 indexed",)


def default_methods(space: spaces.Space[Any]) -> list[str]:
    """The installed methods that are worth comparing for such observations."""
    installed = (AUTO, *available_methods())
    methods = _DEFAULT + _DEFAULT_RGB if _is_rgb(space) else _DEFAULT
    return [method for method in methods if parse_method(method.split()[0]).name in installed]


def buffer_arguments(method: str) -> dict[str, Any]:
    """The constructor arguments that select ``method``: none for ``auto``, which is the default."""
    name, *words = method.split() or [""]
    options: dict[str, Any] = {}
    for word in words:
        if number := re.fullmatch(r"x([1-9]\d*)", word):
            options["frames_per_record"] = int(number[1])
        elif word == "indexed":
            options["indexed_colour"] = True
        else:
            raise ConfigurationError(
                f"{word!r} in {method!r} is not an option. Write 'xN' for N frames per record, or 'indexed' for "
                "indexed colour."
            )
    parsed = parse_method(name)
    if parsed.name == AUTO:
        if options:
            raise ConfigurationError(f"'auto' has no options, but {method!r} names some. Name another method.")
        return {}
    create_codec(parsed, FrameSpec(48, np.dtype(np.uint8), channels=3), **options)  # raises if it is not possible
    return {"compression_method": name} | ({"compression_kwargs": options} if options else {})


def buffer_class(kind: Literal["Replay", "Rollout"], observation_space: spaces.Space[Any], compressed: bool) -> Any:
    """SB3's class for such observations, or the compressed one that replaces it."""
    name = f"Dict{kind}Buffer" if isinstance(observation_space, spaces.Dict) else f"{kind}Buffer"
    return getattr(compressed_buffers, f"Compressed{name}") if compressed else getattr(sb3_buffers, name)


def make_replay_buffer(
    method: str, size: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], n_envs: int
) -> ReplayBuffer:
    """A buffer for ``size`` transitions, counted over all environments."""
    arguments = {} if method == SB3 else buffer_arguments(method)
    made: ReplayBuffer = buffer_class("Replay", observation_space, compressed=method != SB3)(
        size, observation_space, action_space, "cpu", n_envs, **arguments
    )
    return made


def sb3_bytes(size: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> int:
    """Bytes of the arrays in SB3's buffer for ``size`` transitions."""
    parts = observation_space.spaces.values() if isinstance(observation_space, spaces.Dict) else [observation_space]
    # A Dict has no shape of its own, but its parts have.
    observation = sum(math.prod(get_obs_shape(part)) * np.dtype(part.dtype).itemsize for part in parts)  # type: ignore[misc]
    action = get_action_dim(action_space) * np.dtype(action_space.dtype).itemsize
    reward = done = timeout = np.dtype(np.float32).itemsize
    return size * (2 * observation + action + reward + done + timeout)


def _is_rgb(space: spaces.Space[Any]) -> bool:
    """Whether observations are images, channels first, of one or several RGB frames."""
    return is_image_space(space, check_channels=False) and len(space.shape or ()) == 3 and space.shape[0] % 3 == 0  # type: ignore[index]
