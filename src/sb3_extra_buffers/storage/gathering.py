"""Observations out of frame stores.

There is one frame store for each codec that is in use. When ``auto`` changes to another codec, observations that are
stored already stay where they are, with their codec, until they are overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.stacking import StackLayout


def gather(
    stores: Sequence[FrameStore], layout: StackLayout, lanes: Indices, firsts: Indices, outs: list[npt.NDArray[Any]]
) -> None:
    """Fill ``outs`` with the observations that begin at the frames ``firsts``; the newest store comes first."""
    n = len(lanes)
    if layout.is_contiguous:
        views = [out.reshape(n, layout.stack, layout.frame.size).view(np.uint8) for out in outs]
        _gather_frames(stores, lanes, firsts, views)
        return
    frames = [np.empty((n, layout.stack, layout.frame.nbytes), dtype=np.uint8) for _ in outs]
    _gather_frames(stores, lanes, firsts, frames)
    for source, out in zip(frames, outs, strict=True):
        layout.merge(source, out)


def _gather_frames(stores: Sequence[FrameStore], lanes: Indices, firsts: Indices, outs: list[Bytes]) -> None:
    newest = stores[0]
    if len(stores) == 1:
        newest.gather(lanes, firsts, outs)
        return
    is_new = (firsts >= newest.base[lanes]).all(axis=0)
    if is_new.any():
        # Rows that are not in this store are filled with another one's frames, and then overwritten.
        rows = np.where(is_new, np.arange(len(lanes)), is_new.argmax())
        newest.gather(lanes[rows], np.ascontiguousarray(firsts[:, rows]), outs)
    for first, out in zip(firsts, outs, strict=True):
        left = np.flatnonzero(~is_new)
        for store in stores:
            here = first[left] >= store.base[lanes[left]]
            rows, left = left[here], left[~here]
            if len(rows):
                found = np.empty((len(rows), *out.shape[1:]), dtype=np.uint8)
                store.gather(lanes[rows], first[rows][None], [found])
                out[rows] = found
