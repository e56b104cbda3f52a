"""The ring of packed bytes, :class:`~sb3_extra_buffers.storage.arena.Arena`, on a torch device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as th

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.errors import CapacityError
from sb3_extra_buffers.gpu_buffers.raw_buffer import RawBuffer, pack_segments
from sb3_extra_buffers.gpu_buffers.transfer import CPU, Outbox, copy_into
from sb3_extra_buffers.state import SavedState
from sb3_extra_buffers.storage.arena import Arena

_STAGED_BYTES = 1 << 20
_SMALLEST_STEP = 1 << 16
_MOVED_AT_ONCE = 1 << 24


class HeapBudget:
    """What all heaps of a buffer may take together; with ``limit=None`` as much as they like."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.taken = 0

    @property
    def left(self) -> float:
        return float("inf") if self.limit is None else self.limit - self.taken


class DeviceArena(Arena):
    """Bytes that are written are collected and cross the bus together: when there are many, or with :meth:`flush`.

    :param slack: Bytes beyond the end that may be read, though not used: batches are read in windows of one width.
    """

    def __init__(self, device: th.device, budget: HeapBudget, slack: int) -> None:
        super().__init__()
        self.budget = budget
        self.generation = 0
        """Grows when blocks move to other places."""
        self._slack = slack
        self._heap = RawBuffer(slack, device)
        self._staged: list[tuple[int, Bytes]] = []
        self._staged_bytes = 0

    @property
    def device(self) -> th.device:
        return self._heap.device

    @property
    def heap(self) -> th.Tensor:
        """All bytes, of which only what lies between tail and head means something."""
        return self._heap.bytes

    @property
    def data(self) -> Bytes:
        """A copy on the host, for which the device must be waited for."""
        self.flush()
        copy: Bytes = self.heap.cpu().numpy()
        return copy

    def data_with_what_is_staged(self) -> Bytes:
        """The same without sending anything."""
        copy: Bytes = self.heap.cpu().numpy()
        if self.device.type == "cpu":
            copy = copy.copy()
        for start, data in self._staged:
            copy[start : start + len(data)] = data
        return copy

    @property
    def size(self) -> int:
        """Memory taken, without the slack."""
        return len(self._heap) - self._slack

    def write(self, start: int, data: Bytes) -> None:
        if self._staged and start <= self._staged[-1][0]:
            self.flush()  # the ring has begun anew: what is sent together must not overlap, for it arrives in no order
        elif self._staged_bytes > _STAGED_BYTES:
            self.flush()
        self._staged.append((start, data.copy()))
        self._staged_bytes += len(data)

    def flush(self, outbox: Outbox | None = None) -> None:
        """Send what is staged, now or with what else is in an outbox."""
        if outbox is None:
            with Outbox(self.device) as outbox:
                self.flush(outbox)
            return
        if self._staged:
            for start, data in self._staged:
                outbox.put(self.heap, start, data)
            outbox.when_sent(self._all_sent)

    def _all_sent(self) -> None:
        self._staged, self._staged_bytes = [], 0

    def grow(self, size: int) -> tuple[int, int]:
        end = self.limit if self.wrap is None else self.wrap
        missing = self._missing(size)
        wanted = max(size + 1, self.limit // 64, _SMALLEST_STEP)
        step = int(min(wanted, self.size + self.budget.left - end))
        if step < missing:
            raise CapacityError(
                f"The heap is full: {size:,} bytes are needed, {self._available:,} of heap_bytes={self.budget.limit:,} "
                "are available. Pass more heap_bytes."
            )
        if step < wanted and missing <= 0:
            return self.limit, 0
        self.flush()
        size_before = larger = self.size
        if end + step > larger:
            larger = int(min(max(end + step, larger * 9 // 8), larger + self.budget.left))
        if self.wrap is None:
            if larger > size_before:
                self._heap.resize(larger + self._slack)
                self.budget.taken += larger - size_before
            self.limit += step
            return self.limit, 0
        boundary = self.tail
        upper = (self.tail, self.tail + step, self.wrap - self.tail)
        if larger > size_before:
            self._heap.move(larger + self._slack, ((0, 0, self.tail), upper))
            self.budget.taken += larger - size_before
        else:
            self._move_up(*upper)
        self.tail += step
        self.wrap += step
        self.limit = max(self.limit, self.wrap)
        self.generation += 1
        return boundary, step

    def _move_up(self, source: int, target: int, length: int) -> None:
        """Move bytes to a later place that may overlap theirs: from the end on, in pieces, to take little memory."""
        between = self.heap.new_empty(min(length, _MOVED_AT_ONCE))
        for begin in reversed(range(0, length, _MOVED_AT_ONCE)):
            piece = between[: min(_MOVED_AT_ONCE, length - begin)]
            piece.copy_(self.heap[source + begin : source + begin + len(piece)])
            self.heap[target + begin : target + begin + len(piece)].copy_(piece)

    def return_old_memory(self) -> None:
        """Nobody reads :attr:`heap` from before it last grew any more."""
        self._heap.return_old_memory()

    def close_gaps(self, starts: Indices, lengths: Indices) -> None:
        """Move the blocks at ``starts``, given in the order in which they were written, to the beginning, side by side.

        All else is dead from then on. The device copies them to and fro, without the host.
        """
        self.flush()
        ends = np.cumsum(lengths)
        packed = self.heap.new_empty(int(lengths.sum()))
        # Piece by piece, since finding each byte takes many times the memory that it does.
        for piece in np.split(np.arange(len(starts)), np.flatnonzero(np.diff(ends // _MOVED_AT_ONCE)) + 1):
            target = packed[ends[piece[0]] - lengths[piece[0]] : ends[piece[-1]]]
            target.copy_(pack_segments(self.heap, th.from_numpy(starts[piece]), th.from_numpy(lengths[piece])))
        self.heap[: len(packed)] = packed
        self.head, self.tail, self.wrap = len(packed), 0, None
        self.generation += 1

    @property
    def _available(self) -> int:
        """The longest block that fits now, or would after growing as far as allowed."""
        if self.wrap is not None:
            return int(self.tail - self.head - 1 + self.size + self.budget.left - self.wrap)
        return int(max(self.size + self.budget.left - self.head, self.tail - 1))

    def _missing(self, size: int) -> int:
        """How many bytes more are needed before ``size`` bytes can be allocated."""
        if self.wrap is not None:
            return self.head + size + 1 - self.tail
        if size < self.tail:
            return 0
        return self.head + size - self.limit

    def _restore_bytes(self, state: SavedState) -> int:
        stored = state.array("bytes", np.uint8, (None,))
        heap = RawBuffer(len(stored) + self._slack, self.device)
        copy_into(heap.bytes[: len(stored)], stored)
        self.budget.taken += len(stored) - self.size
        self._heap = heap
        return len(stored)

    def to(self, device: th.device) -> None:
        self.flush()
        self._heap.to(device)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("_heap", "_memory")}
        state["_heap"] = self.data[: self.size + self._slack]
        return {**state, "_staged_bytes": 0, "_staged": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        stored = state.pop("_heap")
        self.__dict__.update(state)
        self._heap = RawBuffer(len(stored), CPU)
        self.heap.numpy()[:] = stored
