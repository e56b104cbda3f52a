"""The buffers to compare: SB3's, and ours with a given method.

A method is a ``compression_method``, followed by options: ``xN`` sets ``frames_per_record=N``, and ``indexed`` sets
``indexed_colour=True``, as in ``"zstd-dict/9 x8"``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common import buffers as sb3_buffers
from stable_baselines3.common.preprocessing import is_image_space

from sb3_extra_buffers import compressed as compressed_buffers
from sb3_extra_buffers.codecs.base import FrameSpec
from sb3_extra_buffers.codecs.registry import AUTO, available_methods, create_codec, parse_method
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.measure.transitions import Transition
from sb3_extra_buffers.storage.usage import array_bytes

SB3 = "SB3"
"""Selects SB3's buffer where a method is expected."""
_DEFAULT_METHODS = (AUTO, "delta", "delta-zstd", "zstd-dict/3", "zstd-5", "lz4-frame/1", "igzip1", "gzip1", "none")
"""Methods that are compared by default, if they are installed."""
_RGB_METHODS = ("bitpack", "pixel-lz", "delta-zstd indexed")
"""Further methods that are compared on RGB images."""


@dataclass(frozen=True)
class Task:
    """What a buffer has to store. Sizes count transitions over all environments."""

    kind: Literal["Replay", "Rollout"]
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    n_envs: int

    def class_name(self, method: str) -> str:
        """The name of our class for these observations, or of SB3's if ``method`` is :data:`SB3`."""
        name = f"{'Dict' if isinstance(self.observation_space, spaces.Dict) else ''}{self.kind}Buffer"
        return name if method == SB3 else f"Compressed{name}"

    def make(self, method: str, size: int) -> Any:
        """Create a buffer for ``size`` transitions."""
        module: Any = sb3_buffers if method == SB3 else compressed_buffers
        options = {} if method == SB3 else buffer_arguments(method)
        # SB3's replay buffers count transitions, its rollout buffers steps.
        slots = size if self.kind == "Replay" else max(1, size // self.n_envs)
        return getattr(module, self.class_name(method))(
            slots, self.observation_space, self.action_space, "cpu", n_envs=self.n_envs, **options
        )

    def add(self, buffer: Any, transition: Transition, value: th.Tensor | None = None) -> None:
        """Store a step. A full rollout buffer is reset first.

        :param value: For rollouts, stored as value and, negated, as log-probability; 0 by default.
        """
        if self.kind == "Replay":
            buffer.add(*transition)
            return
        if buffer.full:
            buffer.reset()
        value = th.zeros(self.n_envs) if value is None else value
        buffer.add(transition.obs, transition.action, transition.reward, transition.done, value, -value)

    def batches(self, buffer: Any, batch_size: int) -> Iterator[Any]:
        """Yield batches endlessly. A rollout buffer must be full."""
        while True:
            if self.kind == "Replay":
                yield buffer.sample(batch_size)
            else:
                yield from buffer.get(batch_size)

    def sb3_bytes(self, size: int) -> int:
        """Size of the arrays in SB3's buffer for ``size`` transitions, in bytes."""
        return size * array_bytes(self.make(SB3, self.n_envs)) // self.n_envs  # one step: the smallest buffer


def default_methods(space: spaces.Space[Any]) -> list[str]:
    """The installed methods that are worth comparing for these observations."""
    installed = (AUTO, *available_methods())
    methods = _DEFAULT_METHODS + _RGB_METHODS if _is_rgb(space) else _DEFAULT_METHODS
    return [method for method in methods if parse_method(method.split()[0]).name in installed]


def buffer_arguments(method: str) -> dict[str, Any]:
    """The constructor arguments that select ``method``; empty for ``auto``, which is the default."""
    name, *words = method.split() or [""]
    options: dict[str, Any] = {}
    for word in words:
        if number := re.fullmatch(r"x([1-9]\d*)", word):
            options["frames_per_record"] = int(number[1])
        elif word == "indexed":
            options["indexed_colour"] = True
        else:
            raise ConfigurationError(
                f"{word!r} in {method!r} is not an option. Options are 'xN' for N frames per record, and 'indexed' for "
                "indexed colour."
            )
    parsed = parse_method(name)
    if parsed.name == AUTO:
        if options:
            raise ConfigurationError(f"'auto' takes no options, but got {method!r}. Choose a method to set options.")
        return {}
    create_codec(parsed, FrameSpec(48, np.dtype(np.uint8), channels=3), **options)  # raises if the options do not fit
    return {"compression_method": name} | ({"compression_kwargs": options} if options else {})


def _is_rgb(space: spaces.Space[Any]) -> bool:
    """Whether observations are images of one or several RGB frames, channels first."""
    return is_image_space(space, check_channels=False) and len(space.shape or ()) == 3 and space.shape[0] % 3 == 0  # type: ignore[index]
