"""Lanes of frames that the device keeps by itself, for observations that are there already."""

from __future__ import annotations

from typing import NamedTuple

import torch as th


class Lanes(NamedTuple):
    """What :class:`~sb3_extra_buffers.storage.frame_store.FrameStore` knows about frames before they are in records."""

    ring: th.Tensor
    """``uint8``, (lanes, frames, frame_bytes): the newest frames. Frame *i* is at position *i* modulo their number."""
    heads: th.Tensor
    """``int64``, (lanes,): the number of the next frame."""
    known: th.Tensor
    """``int32``, (lanes,): whether an observation ends at the head, so that the next may share frames with it."""


class Jobs(NamedTuple):
    """Records to be written."""

    table: th.Tensor
    """``int64``, (4, n): the rows below."""

    @property
    def lanes(self) -> th.Tensor:
        return self.table[0]

    @property
    def numbers(self) -> th.Tensor:
        """The number of each record's first frame."""
        return self.table[1]

    @property
    def starts(self) -> th.Tensor:
        """Where in the heap it goes."""
        return self.table[2]

    @property
    def packed(self) -> th.Tensor:
        """Its length and its reference, as in the index; see :data:`.frames.LENGTH_BITS`."""
        return self.table[3]


def waiting_records(lanes: Lanes, encoded: th.Tensor, group: int) -> tuple[th.Tensor, th.Tensor]:
    """The numbers of the frames after ``encoded``, (lanes, records, group), and which of those records are complete."""
    n_records = lanes.ring.shape[1] // group
    numbers = encoded[:, None] + th.arange(n_records * group, device=encoded.device)
    numbers = numbers.view(-1, n_records, group)
    return numbers, numbers[:, :, -1] < lanes.heads[:, None]


def ring_frames(lanes: Lanes, which: th.Tensor, numbers: th.Tensor) -> th.Tensor:
    """The bytes of frames ``numbers`` of the lanes ``which``."""
    return lanes.ring[which, numbers % lanes.ring.shape[1]]


def as_words(frames: th.Tensor) -> th.Tensor:
    """Frames as ``int32``, filled up with zeros."""
    missing = -frames.shape[-1] % 4
    padded = th.nn.functional.pad(frames, (0, missing)) if missing else frames
    return padded.contiguous().view(th.int32)


def gaps(marks: th.Tensor) -> th.Tensor:
    """For each element, how many lie between it and the mark before it; before the first mark, and the beginning."""
    n = marks.shape[-1]
    at = th.arange(n, device=marks.device).expand_as(marks)
    ranks = marks.to(th.int64).cumsum(-1)
    # Place 0 takes what is no mark, and stands for the beginning afterwards.
    places = th.zeros((*marks.shape[:-1], n + 1), dtype=th.int64, device=marks.device)
    places.scatter_(-1, th.where(marks, ranks, 0), at)
    places[..., 0] = -1
    return at - places.gather(-1, ranks - marks.to(th.int64)) - 1


def store_bytes(heap: th.Tensor, starts: th.Tensor, data: th.Tensor, valid: th.Tensor) -> None:
    """Write ``data``, (..., bytes), from ``starts`` on, where ``valid`` says so."""
    addresses = starts[..., None] + th.arange(data.shape[-1], device=heap.device)
    # What is not to be written goes to the slack behind the heap.
    addresses = th.where(valid[..., None], addresses, heap.numel() - 1)
    heap.scatter_(0, addresses.reshape(-1), data.reshape(-1))


def integer_bytes(values: th.Tensor, size: int) -> th.Tensor:
    """Integers as their ``size`` lowest bytes, (..., size)."""
    shifts = 8 * th.arange(size, device=values.device)
    return ((values[..., None] >> shifts) & 0xFF).to(th.uint8)
