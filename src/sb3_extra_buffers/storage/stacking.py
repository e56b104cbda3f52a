"""How an observation is cut into frames, and how to find that out by looking."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Bytes, FrameSpec
from sb3_extra_buffers.errors import ConfigurationError

MAX_STACK = 16
Axis = Literal["first", "last"]


@dataclass(frozen=True)
class StackLayout:
    """Observations of ``shape`` and ``dtype`` that consist of ``stack`` frames along their first or last axis."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stack: int = 1
    axis: Axis = "first"

    @property
    def frame(self) -> FrameSpec:
        return FrameSpec(math.prod(self.shape) // self.stack, self.dtype)

    @property
    def is_contiguous(self) -> bool:
        """Whether the frames of an observation lie one after the other in memory."""
        return self.axis == "first" or self.stack == 1

    def split(self, observations: npt.NDArray[Any]) -> Bytes:
        """Observations, ``(n, *shape)``, as ``(n, stack, frame_bytes)``."""
        n = len(observations)
        if not self.is_contiguous:
            observations = observations.reshape(n, -1, self.stack, self.shape[-1] // self.stack).swapaxes(1, 2)
        return np.ascontiguousarray(observations).reshape(n, self.stack, self.frame.size).view(np.uint8)

    def merge(self, frames: Bytes, out: npt.NDArray[Any]) -> None:
        """The reverse of :meth:`split` into ``out``, for frames that are not contiguous."""
        n, channels = len(out), self.shape[-1] // self.stack
        pixels = frames.view(self.dtype).reshape(n, self.stack, -1, channels)
        out.reshape(n, -1, self.stack, channels)[:] = pixels.swapaxes(1, 2)


def declared_layout(shape: tuple[int, ...], dtype: np.dtype[Any], stack: int) -> StackLayout:
    """The layout where the user says how many frames there are; the axis is the one that can be cut, the first if both."""
    if shape and shape[0] % stack == 0:
        return StackLayout(shape, dtype, stack, "first")
    if shape and shape[-1] % stack == 0:
        return StackLayout(shape, dtype, stack, "last")
    raise ConfigurationError(
        f"frame_stack={stack} does not divide the first or last axis of observations of shape {shape}. "
        "Pass the number of stacked frames, 'auto' or None."
    )


def detect_layout(observations: npt.NDArray[Any]) -> StackLayout:
    """Find the stack in consecutive observations, ``(steps, n_envs, *shape)``.

    A layout fits a step if all frames of an observation but the newest are those of the observation before, and
    something changed. The layout that fits most steps wins, the one with most frames among equals.
    """
    shape, dtype = observations.shape[2:], observations.dtype
    whole = StackLayout(shape, dtype)
    # Bits, not values: frames are compared as they are stored, and NaN must equal itself.
    bits = observations.view(f"u{dtype.itemsize}") if dtype.itemsize in (1, 2, 4, 8) else observations
    before, after = (part.reshape(-1, *shape) for part in (bits[:-1], bits[1:]))
    changed = (before != after).reshape(len(before), -1).any(axis=1)
    before, after = before[changed], after[changed]
    if len(shape) == 0 or len(before) == 0:
        return whole
    best, best_hits = whole, len(before) // 2  # most steps must fit; resets do not
    for stack in range(MAX_STACK, 1, -1):
        for axis, name in ((1, "first"), (-1, "last")):
            if after.shape[axis] % stack or (name == "last" and len(shape) == 1):
                continue
            channels = after.shape[axis] // stack
            older = np.moveaxis(after, axis, -1)[..., :-channels]
            newer = np.moveaxis(before, axis, -1)[..., channels:]
            hits = int((older == newer).reshape(len(before), -1).all(axis=1).sum())
            if hits > best_hits:
                best, best_hits = StackLayout(shape, dtype, stack, name), hits  # type: ignore[arg-type]
    return best
