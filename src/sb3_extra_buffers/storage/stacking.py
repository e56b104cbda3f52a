"""How an observation is cut into frames, and how to detect that from the first observations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Bytes, FrameSpec, Indices
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.state import SavedState, State

MAX_STACK = 16
RGB = 3
_EVERY = 16
"""To detect a stack, every how many-th row or column is compared first."""
Axis = Literal["first", "last"]


class MemoryForm(NamedTuple):
    """How the frames of an observation lie in memory: for each pixel, for each frame, a chunk of some items.

    With channels first there is a single "pixel", and a chunk is a whole frame. With channels last, each pixel has a
    chunk of every frame. A frame is stored channels first: the first items of all chunks, then the second ones.
    """

    pixels: int
    chunk: int
    """Bytes of one frame in one pixel."""
    item: int
    """Bytes that stay together in a stored frame."""


@dataclass(frozen=True)
class StackLayout:
    """Observations of ``shape`` and ``dtype`` that consist of ``stack`` frames along their first or last axis."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stack: int = 1
    axis: Axis = "first"

    @cached_property
    def frame(self) -> FrameSpec:
        size = math.prod(self.shape) // self.stack
        if len(self.shape) != 3:
            row = self.shape[-1] // (1 if self.is_contiguous else self.stack) if len(self.shape) > 1 else 0
            return FrameSpec(size, self.dtype, row_bytes=row * self.dtype.itemsize)
        first, last = self.shape[0] // self.stack, self.shape[-1] // self.stack
        planes = FrameSpec(size, self.dtype, row_bytes=self.shape[2] * self.dtype.itemsize)
        pixels = replace(planes, row_bytes=self.shape[1] * last * self.dtype.itemsize)
        if self.is_contiguous and first == RGB:
            return replace(planes, channels=RGB)
        if last == RGB and (not self.is_contiguous or self.stack == 1):
            return replace(pixels, channels=RGB, channels_last=True)
        return planes if self.is_contiguous and self.shape[0] <= self.shape[2] else pixels

    @property
    def likely_frame(self) -> FrameSpec:
        """The frame while it is not known yet whether this is a stack: it may turn out to be one of RGB images."""
        may_be_rgb = any(size % RGB == 0 for size in (*self.shape[:1], *self.shape[-1:]))
        return replace(self.frame, channels=RGB) if may_be_rgb else self.frame

    @property
    def is_contiguous(self) -> bool:
        """Whether the frames of an observation lie one after the other in memory."""
        return self.axis == "first" or self.stack == 1

    def in_memory(self, observations: npt.NDArray[Any]) -> tuple[Bytes, MemoryForm]:
        """Observations, ``(n, *shape)``, as ``(n, bytes)``, and how frames lie in them. Copies only if necessary."""
        form = self.contiguous_form
        if self.is_contiguous and self.shape and not observations.flags.c_contiguous:
            channels_last = observations.transpose(self._channels_last)
            if channels_last.flags.c_contiguous:
                observations, form = channels_last, self._pixel_after_pixel
        return np.ascontiguousarray(observations).reshape(len(observations), -1).view(np.uint8), form

    @property
    def contiguous_form(self) -> MemoryForm:
        """How frames lie in contiguous observations."""
        return self._frame_after_frame if self.is_contiguous else self._pixel_after_pixel

    @cached_property
    def _frame_after_frame(self) -> MemoryForm:
        return MemoryForm(1, self.frame.nbytes, self.frame.nbytes)

    @cached_property
    def _pixel_after_pixel(self) -> MemoryForm:
        channels = self.shape[0 if self.is_contiguous else -1] // self.stack
        chunk = channels * self.dtype.itemsize
        return MemoryForm(self.frame.nbytes // chunk, chunk, self.dtype.itemsize if self.is_contiguous else chunk)

    @cached_property
    def _channels_last(self) -> tuple[int, ...]:
        """The axes of observations of a channels-first shape, with the channels moved to the end."""
        return (0, *range(2, len(self.shape) + 1), 1)

    def state(self) -> State:
        return {"stack": self.stack, "axis": self.axis}

    @classmethod
    def restored(cls, state: SavedState, shape: tuple[int, ...], dtype: np.dtype[Any]) -> StackLayout:
        stack, axis = state.integer("stack", 1, MAX_STACK), state.value("axis")
        if axis not in ("first", "last") or (stack > 1 and shape[0 if axis == "first" else -1] % stack):
            raise state.error("stack", f"is {stack} along the {axis!r} axis of observations of shape {shape}")
        return cls(shape, dtype, stack, axis)

    def merge(self, frames: Bytes, out: npt.NDArray[Any]) -> None:
        """Write frames, ``(n, stack, frame_bytes)``, to observations in whose memory they are not contiguous."""
        n, channels = len(out), self.shape[-1] // self.stack
        pixels = frames.view(self.dtype).reshape(n, self.stack, -1, channels)
        out.reshape(n, -1, self.stack, channels)[:] = pixels.swapaxes(1, 2)


def declared_layout(shape: tuple[int, ...], dtype: np.dtype[Any], stack: int) -> StackLayout:
    """The layout for a ``frame_stack`` that the user gave. The stack is along the first axis if possible."""
    if shape and shape[0] % stack == 0:
        return StackLayout(shape, dtype, stack, "first")
    if shape and shape[-1] % stack == 0:
        return StackLayout(shape, dtype, stack, "last")
    raise ConfigurationError(
        f"frame_stack={stack} does not divide the first or last axis of observations of shape {shape}. "
        "Pass the number of stacked frames, 'auto' or None."
    )


def n_changes(observations: npt.NDArray[Any]) -> int:
    """How many of these consecutive observations, ``(steps, n_envs, *shape)``, differ from the one before."""
    bits = _bits(observations)
    differs = (bits[1:] != bits[:-1]).reshape(max(len(observations) - 1, 0), observations.shape[1], -1)
    return int(differs.any(axis=2).sum())


def _bits(observations: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Observations as unsigned integers: NaN must equal itself, as it does when stored frames are compared."""
    size = observations.dtype.itemsize
    return observations.view(f"u{size}") if size in (1, 2, 4, 8) else observations


def detect_layout(observations: npt.NDArray[Any]) -> StackLayout:
    """Find the stack in consecutive observations, ``(steps, n_envs, *shape)``.

    A layout fits a step if the observation has changed, and all its frames but the newest are those of the observation
    before. The layout that fits most steps wins; among equals, the one with the most frames.
    """
    shape, dtype = observations.shape[2:], observations.dtype
    whole = StackLayout(shape, dtype)
    if len(observations) < 2 or len(shape) == 0:
        return whole
    bits = _bits(observations)
    before, after = (part.reshape(-1, *shape) for part in (bits[:-1], bits[1:]))
    changed = (before != after).reshape(len(before), -1).any(axis=1)
    before, after = before[changed], after[changed]
    if len(before) == 0:
        return whole
    best, best_hits = whole, len(before) // 2  # most steps must fit; resets do not
    for stack in range(MAX_STACK, 1, -1):
        for axis, name in ((1, "first"), (-1, "last")):
            if after.shape[axis] % stack or (name == "last" and len(shape) == 1):
                continue
            channels = after.shape[axis] // stack
            # Most candidates fit no step. A few pixels are enough to show that.
            other_axis = np.s_[:] if len(shape) == 1 else np.s_[..., ::_EVERY] if axis == 1 else np.s_[:, ::_EVERY]
            hits = _n_fitting(before[other_axis], after[other_axis], axis, channels)
            if hits > best_hits:
                hits = _n_fitting(before, after, axis, channels)
            if hits > best_hits:
                best, best_hits = StackLayout(shape, dtype, stack, name), hits  # type: ignore[arg-type]
    return best


def _n_fitting(before: npt.NDArray[Any], after: npt.NDArray[Any], axis: int, channels: int) -> int:
    """How many observations continue the one before, which has all their frames along ``axis`` but the newest."""
    if axis == 1:
        older, newer = after[:, :-channels], before[:, channels:]
    else:
        older, newer = after[..., :-channels], before[..., channels:]
    return int((older == newer).reshape(len(before), -1).all(axis=1).sum())


def numbers_from(firsts: Indices, counts: Indices) -> tuple[Indices, Indices]:
    """For each lane, the ``counts`` numbers from ``firsts`` on. Returns their lanes, and the numbers, lane by lane."""
    lanes = np.repeat(np.arange(len(counts)), counts)
    return lanes, np.arange(len(lanes)) + (firsts - (np.cumsum(counts) - counts))[lanes]
