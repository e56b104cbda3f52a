"""The learner's view of a part in a shard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.compressed.segments import ReceivedSegment, SegmentHeader, SegmentInfo
from sb3_extra_buffers.distributed.parts import default_part_class
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import SavedState
from sb3_extra_buffers.storage.record_copies import missing_references

if TYPE_CHECKING:
    from sb3_extra_buffers.distributed.remote import Shards

_ADDED_STEPS = 32
"""How many steps ``add`` collects before it sends them to the shard."""


class RemotePart:
    """What the learner knows about a part in a shard: how full it is, and the last segment that was sent to it."""

    def __init__(self, shards: Shards, number: int, template: Any, n_slots: int) -> None:
        self.n_envs, self.buffer_size = template.n_envs, n_slots
        self.optimize_memory_usage = template.optimize_memory_usage
        self.pos, self.full = 0, False
        self._shards, self._number, self._template = shards, number, template
        self._last: ReceivedSegment | None = None
        self._rewards: npt.NDArray[np.float32] = np.zeros((0, self.n_envs), dtype=np.float32)
        self.starts_over = False
        """Whether the next segment does not continue the last one, for example because the shard was restarted.

        The references of the last one are sent again, because the shard may lack them.
        """

    def size(self) -> int:
        return self.buffer_size if self.full else self.pos

    def add(self, *step: Any) -> None:
        """Add a step of all environments. Several steps are sent to the shard at once."""
        added = self._shards.added.get(self._number)
        if added is None:
            template, n_steps = self._template, 2 * _ADDED_STEPS
            spaces = template.observation_space, template.action_space
            options = template.optimize_memory_usage, template.handle_timeout_termination
            added = default_part_class(spaces[0])(n_steps * self.n_envs, *spaces, "cpu", self.n_envs, *options)
            self._shards.added[self._number] = added
        added.add(*step)
        if added._n_unsent() >= _ADDED_STEPS:
            self._shards.send_added()

    def _end_episodes(self) -> None:
        """Let the shard mark the newest steps as the ends of their episodes when it receives the next segment."""
        self.starts_over = True

    def ingest_segment(self, data: bytes | Bytes) -> SegmentInfo:
        """Send a segment to the shard; see :meth:`.CompressedReplayBuffer.ingest_segment`."""
        header: SegmentHeader
        with self._template._opened(data) as (header, segment):
            last = self._last if self._last is not None and self._last.stream == header.stream else None
            if last is not None and header.sequence <= last.sequence:
                return header.info(0, 0, True)
            n_steps, rewards = header.n_steps, self._rewards
            contents = {} if last is None else last.contents
            if n_steps:
                rewards = segment.part("fields").array("rewards", np.float32, (n_steps, self.n_envs)).copy()
                contents = _contents(self._template._stores, segment, contents)
        self._shards.wait_for_room(self._number)
        with uninterrupted():  # Ctrl-C must not come between sending a segment and counting it
            continues = last is not None and header.first_step == last.n_steps and not self.starts_over
            before = None
            if self.starts_over and last is not None:
                # Send the references of the last segment again. Because of the -1, the new segment does not continue
                # that one, but begins new episodes.
                before = ReceivedSegment(header.stream, header.sequence - 1, -1, last.contents)
            received = np.frombuffer(data, dtype=np.uint8)
            self._shards.send_segment(self._number, received, before, n_steps * self.n_envs)
            self.starts_over, self._rewards = False, rewards
            self._last = ReceivedSegment(header.stream, header.sequence, header.first_step + n_steps, contents)
            self.full = self.full or self.pos + n_steps >= self.buffer_size
            self.pos = (self.pos + n_steps) % self.buffer_size
        return header.info(n_steps, n_steps * self.n_envs, continues)

    def _field_rows(self, name: str, slots: Indices) -> npt.NDArray[Any]:
        """The rewards of the last segment. :class:`.Intake` passes them to callbacks."""
        assert name == "rewards"
        return self._rewards


def _contents(
    stores: Iterable[str], segment: SavedState, known: dict[str, dict[str, Bytes]]
) -> dict[str, dict[str, Bytes]]:
    """The references that a segment needs, by store and checksum: those in the segment, and those known before."""
    contents = {}
    for key in stores:
        part = segment.part("stores").part(key)
        if part.value("form") == "frames":
            sent, digests = part.part("records").part("contents"), part.part("records").value("digests")
            new = {digest: sent.array(digest, np.uint8, (None,)) for digest in sent.array_names()}
            found = {**known.get(key, {}), **new}
            try:
                contents[key] = {digest: found[digest] for digest in digests}
            except KeyError:
                raise missing_references() from None
    return contents
