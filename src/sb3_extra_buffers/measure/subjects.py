"""The replay buffers that are compared, each known by a name: SB3's own, or the method that ours compresses with.

After a method may stand ``xN`` for ``frames_per_record=N`` and ``indexed`` for ``indexed_colour=True``, as in
``"zstd-dict/9 x8"``.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape, is_image_space

from sb3_extra_buffers.codecs.base import FrameSpec
from sb3_extra_buffers.codecs.registry import AUTO, available_methods, create_codec, parse_method
from sb3_extra_buffers.compressed import CompressedDictReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError

SB3 = "SB3 ReplayBuffer"
_USUAL = (AUTO, "delta", "zstd-dict/3", "zstd-dict/9 x8", "zstd-5", "lz4-frame/1", "igzip1", "gzip1", "none")
_USUAL_RGB = ("zstd-dict/9 x8 indexed",)


def usual_subjects(space: spaces.Space[Any]) -> list[str]:
    """Methods worth a look for observations of this kind, of those that are installed."""
    installed = (AUTO, *available_methods())
    usual = _USUAL + _USUAL_RGB if _is_rgb(space) else _USUAL
    return [subject for subject in usual if parse_method(subject.split()[0]).name in installed]


def buffer_arguments(subject: str) -> dict[str, Any]:
    """The arguments that make our buffer the subject: none for ``auto``, which is the default."""
    method, *words = subject.split() or [""]
    options: dict[str, Any] = {}
    for word in words:
        if number := re.fullmatch(r"x([1-9]\d*)", word):
            options["frames_per_record"] = int(number[1])
        elif word == "indexed":
            options["indexed_colour"] = True
        else:
            raise ConfigurationError(
                f"{word!r} in {subject!r} says nothing. After a method may stand 'xN' for N frames per record, "
                "and 'indexed' for indexed colour."
            )
    parsed = parse_method(method)
    if parsed.name != AUTO:
        pixels = FrameSpec(48, np.dtype(np.uint8), channels=3)
        create_codec(parsed, pixels, **options)  # says what is wrong with the options, or not installed
    elif options:
        raise ConfigurationError(f"'auto' takes no options, but {subject!r} has some. Name a method to pass them to.")
    arguments: dict[str, Any] = {} if parsed.name == AUTO else {"compression_method": method}
    return arguments | ({"compression_kwargs": options} if options else {})


def make_replay_buffer(
    subject: str, size: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], n_envs: int
) -> ReplayBuffer:
    """A buffer for ``size`` transitions, those of all environments together."""
    is_dict = isinstance(observation_space, spaces.Dict)
    buffer_class: type[ReplayBuffer]
    if subject == SB3:
        buffer_class, arguments = DictReplayBuffer if is_dict else ReplayBuffer, {}
    else:
        buffer_class = CompressedDictReplayBuffer if is_dict else CompressedReplayBuffer
        arguments = buffer_arguments(subject)
    return buffer_class(size, observation_space, action_space, "cpu", n_envs, **arguments)


def sb3_bytes(size: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> int:
    """What the arrays of SB3's buffer for ``size`` transitions take."""
    parts = observation_space.spaces.values() if isinstance(observation_space, spaces.Dict) else [observation_space]
    observation = sum(_bytes_of(part) for part in parts)
    action = get_action_dim(action_space) * np.dtype(action_space.dtype).itemsize
    reward = done = timeout = np.dtype(np.float32).itemsize
    return size * (2 * observation + action + reward + done + timeout)


def _bytes_of(space: spaces.Space[Any]) -> int:
    shape = get_obs_shape(space)
    assert isinstance(shape, tuple)  # a Dict has none of its own, but its parts are no Dicts
    return math.prod(shape) * np.dtype(space.dtype).itemsize


def _is_rgb(space: spaces.Space[Any]) -> bool:
    """Images, channels first, whose channels could be colours, of one frame or several."""
    return is_image_space(space, check_channels=False) and len(space.shape or ()) == 3 and space.shape[0] % 3 == 0  # type: ignore[index]
