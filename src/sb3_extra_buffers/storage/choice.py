"""``auto``: try what is installed on observations that were just seen, and weigh size against time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.registry import available_methods, parse_method
from sb3_extra_buffers.storage.config import CodecRecipe
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.stacking import StackLayout

BYTES_PER_MICROSECOND = 200.0
"""How much smaller a frame must be to be worth a microsecond more of encoding and decoding."""

_NONE = CodecRecipe(parse_method("none"))
_CANDIDATES = (
    CodecRecipe(parse_method("delta")),
    CodecRecipe(parse_method("zstd-dict/3")),
    CodecRecipe(parse_method("zstd-dict/3"), {"frames_per_record": 8}),
    CodecRecipe(parse_method("zstd")),
    CodecRecipe(parse_method("lz4-frame/0")),
    CodecRecipe(parse_method("igzip/1")),
    CodecRecipe(parse_method("gzip/1")),
)
_SMALLEST_FRAME = 512
"""Frames of fewer bytes, as of vector observations, are not worth the index that finds them again."""


@dataclass(frozen=True)
class Preference:
    """A recipe, and what a frame took with it: bytes, and microseconds to encode and decode."""

    recipe: CodecRecipe
    frame_bytes: float
    microseconds: float

    @property
    def cost(self) -> float:
        return self.frame_bytes + BYTES_PER_MICROSECOND * self.microseconds


def choose_codec(
    layout: StackLayout, steps: npt.NDArray[Any], current: CodecRecipe | None = None
) -> Preference:
    """The codec that stores ``steps``, ``(n, n_envs, *shape)``, at the lowest cost.

    ``current`` is given up only for one that costs a quarter less.
    """
    trials = [_try(_NONE, layout, steps)]
    if layout.frame.nbytes >= _SMALLEST_FRAME:
        installed = available_methods()
        trials += [_try(recipe, layout, steps) for recipe in _CANDIDATES if recipe.method.name in installed]
    best = min(trials, key=lambda trial: trial.cost)
    # A saving of less than a tenth is not worth a codec.
    if best.frame_bytes > 0.9 * layout.frame.nbytes:
        best = trials[0]
    stay = [trial for trial in trials if trial.recipe == current]
    return stay[0] if stay and best.cost > 0.75 * stay[0].cost else best


def _try(recipe: CodecRecipe, layout: StackLayout, steps: npt.NDArray[Any]) -> Preference:
    """Store the steps for real. The first half teaches the codec, the second half is measured."""
    n_envs = steps.shape[1]
    lanes = np.arange(n_envs)
    store = FrameStore(recipe.build(layout.frame), n_envs, layout)
    half = len(steps) // 2
    for step in steps[:half]:
        store.append(lanes, step, lambda: store.encoded * 0)
    bytes_before, frames_before = store.arena.live_bytes, int(store.encoded.sum())
    began = time.perf_counter()
    for step in steps[half:]:
        store.append(lanes, step, lambda: store.encoded * 0)
    encoding = time.perf_counter() - began
    n_frames = max(int(store.encoded.sum()) - frames_before, 1)
    n_bytes = store.arena.live_bytes - bytes_before

    firsts = np.maximum(store.encoded - layout.stack - np.arange(half)[:, None], 0)
    where = np.tile(lanes, half)
    out = np.empty((len(where), layout.stack, layout.frame.nbytes), dtype=np.uint8)
    began = time.perf_counter()
    if len(where):
        store.gather(where, [firsts.reshape(-1)], [out])
    decoding = time.perf_counter() - began
    microseconds = 1e6 * (encoding / n_frames + decoding / max(len(where) * layout.stack, 1))
    return Preference(recipe, n_bytes / n_frames, microseconds)
