"""``auto``: try the installed codecs on recent observations, and choose the best trade of size against time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.codecs.registry import available_methods, parse_method
from sb3_extra_buffers.storage.config import CodecRecipe
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.stacking import RGB, StackLayout

TIME_WEIGHT = 0.85
"""Cost is bytes times time to this power: half the memory is worth a little more than twice the time."""
_FIXED_BYTES = 64
"""About the size of a transition without its frame, whatever the codec."""
_SMALL_ENOUGH = 1 / 64
"""Compressed to this part of a raw frame, further savings matter less and less."""

_READS = 8
"""How often an observation is read for each time that it is stored: by DQN with its usual batches, and by PPO."""
_READ_AT_MOST = 1 << 19
_MOST_LANES = 4
DELTA_ACCEPT_RATIO = 1 / 20
"""If ``delta`` compresses frames to this part or less, no other codec is tried."""

_NONE = CodecRecipe(parse_method("none"))
_INDEXED = {"indexed_colour": True}
_DELTA = CodecRecipe(parse_method("delta"))
_CANDIDATES = (
    CodecRecipe(parse_method("zstd-dict/3")),
    CodecRecipe(parse_method("zstd-dict/3"), {"frames_per_record": 8}),
    CodecRecipe(parse_method("zstd/3")),
)
_WITHOUT_ZSTD = (
    CodecRecipe(parse_method("lz4-frame/0")),
    CodecRecipe(parse_method("igzip/1")),
    CodecRecipe(parse_method("gzip/1")),
)
_RGB_CANDIDATES = (
    CodecRecipe(parse_method("delta"), _INDEXED),
    CodecRecipe(parse_method("zstd/3"), _INDEXED),
    CodecRecipe(parse_method("zstd-dict/3"), {"frames_per_record": 8, **_INDEXED}),
    CodecRecipe(parse_method("gzip/1"), _INDEXED),
)
_SMALLEST_FRAME = 512
"""Smaller frames, as of vector observations, are not compressed: finding their records would cost too much."""


@dataclass(frozen=True)
class Trial:
    """What a codec cost: bytes per frame, and the time to store an observation once and read it several times."""

    recipe: CodecRecipe
    raw_bytes: int
    frame_bytes: float
    microseconds: float

    @property
    def cost(self) -> float:
        memory = self.frame_bytes + _FIXED_BYTES + _SMALL_ENOUGH * self.raw_bytes
        return float(memory * self.microseconds**TIME_WEIGHT)


def choose_codec(
    layout: StackLayout,
    steps: npt.NDArray[Any],
    current: CodecRecipe | None = None,
    delta_accept_ratio: float = DELTA_ACCEPT_RATIO,
) -> Trial:
    """The codec that stores ``steps``, ``(n, n_envs, *shape)``, at the lowest cost.

    :param current: The codec in use, which is only replaced by one that costs a quarter less.
    :param delta_accept_ratio: If ``delta``, the fastest codec, compresses frames to this part or less, no other is
        tried.
    """
    raw_bytes, installed = layout.frame.nbytes, available_methods()
    if raw_bytes < _SMALLEST_FRAME:
        return Trial(_NONE, raw_bytes, raw_bytes, 0.0)
    steps = np.ascontiguousarray(steps[:, :_MOST_LANES])
    trials = [_try(_DELTA, layout, steps)]
    if has_numba() and trials[0].frame_bytes <= delta_accept_ratio * raw_bytes:
        return trials[0]
    others = (*(_CANDIDATES if "zstd" in installed else _WITHOUT_ZSTD), *(_RGB_CANDIDATES if _is_rgb(layout) else ()))
    trials += [_try(recipe, layout, steps) for recipe in others if recipe.method.name in installed]
    # A saving of less than a tenth is not worth a codec.
    trials = [trial for trial in trials if trial.frame_bytes <= 0.9 * raw_bytes]
    if not trials:
        return Trial(_NONE, raw_bytes, raw_bytes, 0.0)
    best = min(trials, key=lambda trial: trial.cost)
    stay = [trial for trial in trials if trial.recipe == current]
    return stay[0] if stay and best.cost > 0.75 * stay[0].cost else best


def _is_rgb(layout: StackLayout) -> bool:
    return layout.frame.channels == RGB and layout.dtype == np.uint8


def _try(recipe: CodecRecipe, layout: StackLayout, steps: npt.NDArray[Any]) -> Trial:
    """Store the steps and read some. The codec learns from the first half, and the second half is measured."""
    n_envs = steps.shape[1]
    lanes = np.arange(n_envs)
    store = FrameStore(recipe.build(layout.frame), n_envs, layout)
    half = len(steps) // 2
    for step in steps[:half]:
        store.append(lanes, step, lambda: store.encoded * 0)
    bytes_before, frames_before = store.arena.live_bytes, int(store.encoded.sum())
    began = time.thread_time()
    for step in steps[half:]:
        store.append(lanes, step, lambda: store.encoded * 0)
    storing = (time.thread_time() - began) / (len(steps) - half) / n_envs
    n_frames = max(int(store.encoded.sum()) - frames_before, 1)
    n_bytes = store.arena.live_bytes - bytes_before

    # Observations far apart, as in a random batch, so that no two are in the same record.
    apart = layout.stack + 2 * store.codec.frames_per_record
    newest = int(store.encoded.min()) - layout.stack
    # Few enough for one thread.
    most = max(1, _READ_AT_MOST // (layout.stack * layout.frame.nbytes))
    firsts, where = (grid.reshape(-1)[:most] for grid in np.meshgrid(np.arange(newest, -1, -apart), lanes))
    out = np.empty((len(where), layout.stack, layout.frame.nbytes), dtype=np.uint8)
    reading = []
    for _ in range(5 if len(where) else 0):
        began = time.thread_time()
        store.gather(where, firsts[None], [out])
        reading.append((time.thread_time() - began) / len(where))
    return Trial(
        recipe, layout.frame.nbytes, n_bytes / n_frames, 1e6 * (storing + _READS * min(reading, default=0.0)) + 1e-3
    )
