"""A shard: a process that holds some parts of a replay buffer and answers requests for transitions."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.compressed.replay_buffer import CompressedReplayBuffer
from sb3_extra_buffers.compressed.segments import ReceivedSegment
from sb3_extra_buffers.distributed.parts import Fields, Parts, Places
from sb3_extra_buffers.distributed.stamps import generations_of
from sb3_extra_buffers.errors import CorruptDataError, SegmentError
from sb3_extra_buffers.storage import shared_memory
from sb3_extra_buffers.storage.blocks import Block, BlockMaker
from sb3_extra_buffers.storage.shared_memory import Address
from sb3_extra_buffers.storage.usage import MemoryUsage

_FLUSH_AFTER = 64
"""A part on disk is flushed after 1, 2, 4, ... segments, and then each time after this many.

A shard that dies loses the segments since the last flush.
"""


class ShardPlan(NamedTuple):
    """The arguments for creating a shard in any process."""

    buffer_class: type[CompressedReplayBuffer]
    arguments: dict[str, Any]
    """The constructor arguments of each part."""
    numbers: list[int]
    """The numbers of the shard's parts."""
    path: str | None
    """For a shard on disk: a folder with one folder per part, from which a restarted shard is restored."""
    n_batches: int
    """The number of batches that the learner keeps memory for."""


class Target(NamedTuple):
    """Memory of the learner to which a shard on the same machine writes its rows of a batch."""

    memory: Address
    n: int
    """Rows of the whole batch."""
    first: int
    """The first row of this shard."""


class Drawn(NamedTuple):
    """The reply to a request for transitions."""

    blocks: dict[str, Block]
    """The observations of each key; empty if the shard has written them to the learner's memory."""
    fields: Fields
    priorities: npt.NDArray[np.float64] | None
    indices: tuple[Indices, Indices, Indices] | None
    """With priorities: part, place, and how many times the place was overwritten."""
    total: float
    """The sum of all priorities in the shard."""
    n_refused: int
    """The number of segments that the shard could not ingest so far."""
    refusal: str
    """The error message of the last one."""


class Shard:
    """Some parts of a buffer. Its methods number them from 0."""

    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan
        # The learner's memory stays attached, because the next batches use it again.
        self._attached = functools.lru_cache(plan.n_batches)(shared_memory.attach)
        self._n_steps = [0] * len(plan.numbers)
        """The number of steps that each part has received, rounded up to full parts when it is emptied or loaded."""
        self._use([self._make(number) for number in plan.numbers])

    def _make(self, number: int) -> CompressedReplayBuffer:
        on_disk: dict[str, Any] = {}
        if self._plan.path is not None:
            on_disk = {"storage": "mmap", "path": Path(self._plan.path) / f"part{number}"}
        return self._plan.buffer_class(**self._plan.arguments, device="cpu", **on_disk)

    def _use(self, buffers: list[Any]) -> None:
        self._buffers = buffers
        self._parts = Parts(buffers, th.device("cpu"))
        self._makers = {key: BlockMaker(stores) for key, stores in self._parts.stores.items()}
        self._n_refused, self._refusal = 0, ""
        self._start_counting()

    def _start_counting(self) -> None:
        """Count steps and segments after the contents of all parts have changed."""
        # The steps of loaded parts count as received. Counts never fall, so that old generations are not used again.
        size = int(self._parts.first.buffer_size)
        self._n_steps = [
            -(-n // size) * size + int(part.pos) + size * bool(part.full)
            for n, part in zip(self._n_steps, self._buffers, strict=True)
        ]
        self._n_unflushed, self._flush_after = [0] * len(self._buffers), [1] * len(self._buffers)

    def states(self) -> list[tuple[int, bool]]:
        """The position of each part, and whether it is full."""
        return [(int(part.pos), bool(part.full)) for part in self._buffers]

    def ingest(self, part: int, segment: Bytes, before: ReceivedSegment | None, max_priority: float | None) -> None:
        """Append a segment. If that fails, the shard refuses the segment, and its next replies say so.

        :param before: The previous segment, if this shard may lack its references.
        :param max_priority: The learner's largest priority so far.
        """
        buffer = self._buffers[part]
        if before is not None:
            buffer._received = before
        if max_priority is not None:
            self._parts.raise_max_priority(max_priority)
        try:
            self._n_steps[part] += buffer.ingest_segment(segment).n_steps
        except (CorruptDataError, SegmentError) as error:
            self._n_refused, self._refusal = self._n_refused + 1, str(error)
            return
        self._n_unflushed[part] += 1
        if self._plan.path is not None and self._n_unflushed[part] >= self._flush_after[part]:
            buffer.flush()
            self._n_unflushed[part], self._flush_after[part] = 0, min(2 * self._flush_after[part], _FLUSH_AFTER)

    def draw(self, requests: list[tuple[Any, Target | None]]) -> list[Drawn | None]:
        """Read the rows of several batches.

        :param requests: For each batch, the arguments of :meth:`_draw` or :meth:`_draw_by_priority`.
        """
        draw: Any = self._draw_by_priority if self._parts.is_prioritized else self._draw
        return [draw(*arguments, target) for arguments, target in requests]

    def _draw(self, numbers: Indices, slots: Indices, envs: Indices, target: Target | None) -> Drawn | None:
        """Read transitions that the learner has drawn; ``None`` if some are missing, because a segment was refused."""
        sizes = np.array([part.size() for part in self._buffers])
        if (slots >= sizes[numbers]).any():
            return None
        return self._drawn(Places(numbers, slots, envs), target, None, None, 0.0)

    def _draw_by_priority(self, positions: npt.NDArray[np.float64], n: int, target: Target | None) -> Drawn | None:
        """Draw transitions in proportion to their priorities; ``None`` if the shard is empty.

        :param positions: Heights in the cumulative sum of priorities, scaled so that the total is ``n``.
        """
        trees = self._parts.trees
        total = float(trees.totals.cumsum()[-1])
        if total == 0:
            return None
        numbers, found = trees.find(positions * total / n)
        places = Places(numbers, *np.divmod(found, self._parts.first.n_envs))
        indices = numbers, found, self._generations(numbers, places.slots)
        return self._drawn(places, target, trees.get(numbers, found), indices, total)

    def _drawn(self, places: Places, target: Target | None, priorities: Any, indices: Any, total: float) -> Drawn:
        fields, wanted = self._parts.read_fields(places)
        memory = None if target is None else self._attached(target.memory)
        blocks = {}
        if target is None or memory is None:
            blocks = {key: maker.make(places.numbers, wanted, places.envs) for key, maker in self._makers.items()}
        else:
            rows = slice(target.first, target.first + len(places.slots))
            for key, outs in self._parts.batch_in(memory, target.n).items():
                self._parts.stores[key].fill(places.numbers, wanted, places.envs, [out[rows] for out in outs])
        return Drawn(blocks, fields, priorities, indices, total, self._n_refused, self._refusal)

    def _generations(self, numbers: Indices, slots: Indices) -> Indices:
        """How many times these slots were overwritten."""
        n_steps: Indices = np.array(self._n_steps)[numbers]
        return generations_of((n_steps - 1 - slots) // int(self._parts.first.buffer_size))

    def update(
        self, indices: tuple[Indices, Indices, Indices], priorities: npt.NDArray[np.float64], max_priority: float
    ) -> None:
        """Set priorities. Ignores those of transitions that have been overwritten since."""
        numbers, places, generations = indices
        current = generations == self._generations(numbers, places // self._parts.first.n_envs)
        self._parts.set_priorities(numbers[current], places[current], priorities[current], max_priority)

    def check_folders(self) -> None:
        """Raise an error if a part is on disk in a folder that cannot be used, maybe because another buffer uses it."""
        for part in self._buffers:
            part._check_folder()

    def check(self) -> None:
        for part in self._buffers:
            part.check()

    def reset(self) -> None:
        for part in self._buffers:
            part.reset()
            if self._plan.path is not None:
                part.flush()
        self._start_counting()

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage.of_parts([part.memory_usage() for part in self._buffers])

    def save(self, paths: list[str]) -> None:
        for part, path in zip(self._buffers, paths, strict=True):
            part.save(path)

    def load(self, paths: list[str]) -> None:
        """Replace the parts by those saved in these files."""
        parts: list[Any] = [CompressedReplayBuffer.load(path, device="cpu") for path in paths]
        for part, own, path in zip(parts, self._buffers, paths, strict=True):
            if type(part) is not type(own) or part.buffer_size != own.buffer_size or part.n_envs != own.n_envs:
                raise CorruptDataError(
                    f"{path} holds another buffer than the parts of this shard: its class or size differs."
                )
            if part._digest_of_spaces() != own._digest_of_spaces():
                raise CorruptDataError(f"{path} holds a buffer for other spaces than those of this shard.")
        self.close()
        self._use(parts)

    def close(self) -> None:
        for part in self._buffers:
            part.close()
