"""Where frames are found on a device, and the torch operations that all methods share."""

from __future__ import annotations

from typing import NamedTuple

import torch as th

LENGTH_BITS = 32
"""The second number of a record's index entry is its length, and above these bits its reference."""


class DeviceFrames(NamedTuple):
    """A device's copy of what :class:`~sb3_extra_buffers.storage.frame_store.FrameStore` knows."""

    heap: th.Tensor
    """``uint8``: the records."""
    records: th.Tensor
    """``int64``, (lanes, capacity, 2): where each record starts; its length and reference."""
    table: th.Tensor
    """``int32``, (references, words): the reference frames. Without elements for methods that have none."""
    ring: th.Tensor
    """``uint8``, (lanes, frames, frame_bytes): frames that wait to become a record."""
    encoded: th.Tensor
    """``int64``, (lanes,): the first frame of each lane that is not in a record."""
    any_waiting: bool
    """Whether there are such frames at all."""
    group: int
    """Frames in a record."""
    stack: int
    """Frames in an observation."""
    frame_bytes: int

    @classmethod
    def empty(cls, heap: th.Tensor, ring_shape: tuple[int, ...], group: int, stack: int) -> DeviceFrames:
        """Nothing but a heap."""
        n_lanes, _, frame_bytes = ring_shape
        device = heap.device
        return cls(
            heap=heap,
            records=th.zeros((n_lanes, 0, 2), dtype=th.int64, device=device),
            table=th.zeros((0, -(-frame_bytes // 4)), dtype=th.int32, device=device),
            ring=th.zeros(ring_shape, dtype=th.uint8, device=device),
            encoded=th.zeros(n_lanes, dtype=th.int64, device=device),
            any_waiting=False,
            group=group,
            stack=stack,
            frame_bytes=frame_bytes,
        )


class Hints(NamedTuple):
    """What the host knows about the records of a batch: it spares the device work, and the host a wait."""

    longest: int
    """Bytes in the longest record that is not raw."""
    any_raw: bool
    any_waiting: bool
    """Whether a frame is still in the ring."""
    any_missing: bool
    """Whether a frame was never written, and so reads as zeros."""

    @property
    def all_compressed(self) -> bool:
        """Whether every frame is in a record that is not raw."""
        return not (self.any_raw or self.any_waiting or self.any_missing)


class Records(NamedTuple):
    """The record of each frame wanted, and the frame's position in it."""

    starts: th.Tensor
    lengths: th.Tensor
    references: th.Tensor
    positions: th.Tensor


def find_records(frames: DeviceFrames, lanes: th.Tensor, numbers: th.Tensor) -> Records:
    """Look frames up in the index. Numbers below zero, of frames that do not exist, find some record or other."""
    capacity = frames.records.shape[1]
    numbers = numbers.clamp(min=0)
    entries = frames.records[lanes, (numbers // frames.group) % capacity]
    packed = entries[:, 1]
    return Records(entries[:, 0], packed & ((1 << LENGTH_BITS) - 1), packed >> LENGTH_BITS, numbers % frames.group)


def windows(heap: th.Tensor, starts: th.Tensor, width: int) -> th.Tensor:
    """The ``width`` bytes from each of ``starts`` on, ``(n, width)``; what lies outside is arbitrary."""
    last = heap.numel() - width
    if last < 0 or width == 0:
        return heap.new_zeros((starts.numel(), width))
    return heap.as_strided((last + 1, width), (1, 1))[starts.clamp(0, last)]


def complete(
    frames: DeviceFrames, hints: Hints, lanes: th.Tensor, numbers: th.Tensor, records: Records, decoded: th.Tensor
) -> th.Tensor:
    """Replace decoded frames, ``(n, frame_bytes)``, where they do not come from an encoded record."""
    if hints.any_raw:
        raw = records.lengths == frames.group * frames.frame_bytes
        stored = windows(frames.heap, records.starts + records.positions * frames.frame_bytes, frames.frame_bytes)
        decoded = th.where(raw[:, None], stored, decoded)
    if hints.any_waiting:
        waiting = numbers >= frames.encoded[lanes]
        stored = frames.ring[lanes, numbers.clamp(min=0) % frames.ring.shape[1]]
        decoded = th.where(waiting[:, None], stored, decoded)
    if hints.any_missing:
        decoded = th.where((numbers < 0)[:, None], th.zeros_like(decoded), decoded)
    return decoded
