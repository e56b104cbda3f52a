"""Segments: the newest steps of a buffer as bytes that another buffer appends without decoding them.

Use them to move experience between processes or machines, for logs, and to merge buffers.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers import __version__
from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.compressed.saving import SaveableBuffer
from sb3_extra_buffers.errors import CorruptDataError, FileFormatError, SegmentError
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.persistence import container
from sb3_extra_buffers.persistence.files import as_corrupt, flat
from sb3_extra_buffers.state import SavedState, State, decode, encode
from sb3_extra_buffers.storage import segments

SEGMENT_VERSION = 1
_NAME = "The segment"
_MOST_STEPS = 1 << 32
_LARGEST_POLICY_VERSION = 1 << 62
_MOST_ZEROS = 64 << 20
"""The most bytes of zeros in the arrays of a segment. Without a limit, a few bytes could make the receiver allocate
any amount of memory."""


class SegmentInfo(NamedTuple):
    """What :meth:`SegmentBuffer.ingest_segment` appended."""

    n_steps: int
    """0 for a segment that was ingested before."""
    n_transitions: int
    sequence: int
    """The number of the segment. A sender counts its segments from 0."""
    continues: bool
    """Whether it continues the previous segment. If not, the episodes before it were marked as ended, so that no n-step
    return extends into the segment."""
    policy_version: int | None
    extra: dict[str, Any]


@dataclass
class _Exported:
    """How far a buffer has been exported."""

    stream: str
    pos: int
    n_added: int
    sequence: int = 0
    n_steps: int = 0
    """All steps of the stream so far, including those that were overwritten before an export."""
    known: dict[str, set[str]] = field(default_factory=dict)
    """For each store, the checksums of the reference frames and dictionaries that the last segment needs."""


class SegmentHeader(NamedTuple):
    """The header of a segment."""

    n_steps: int
    n_columns: int
    stream: str
    sequence: int
    first_step: int
    policy_version: int | None
    extra: dict[str, Any]

    @classmethod
    def read(cls, header: SavedState) -> SegmentHeader:
        extra = decode(header.value("extra"))
        if not isinstance(extra, dict):
            raise header.error("extra", "must be a dict")
        return cls(
            header.integer("n_steps", 0, _MOST_STEPS),
            header.integer("columns", 1, 2),
            str(header.value("stream")),
            header.integer("sequence"),
            header.integer("first_step"),
            header.integer("policy_version", -_LARGEST_POLICY_VERSION) if header.has("policy_version") else None,
            extra,
        )

    def info(self, n_steps: int, n_transitions: int, continues: bool) -> SegmentInfo:
        return SegmentInfo(n_steps, n_transitions, self.sequence, continues, self.policy_version, self.extra)


@dataclass
class ReceivedSegment:
    """The last segment that a buffer ingested."""

    stream: str
    sequence: int
    n_steps: int
    contents: dict[str, dict[str, Bytes]]
    """For each store, the reference frames and dictionaries that the segment needs, by checksum."""
    pos: int = 0
    n_added: int = 0
    """The buffer's count of steps afterwards. If it has changed, the next segment does not continue this one."""


class SegmentBuffer(SaveableBuffer):
    """Exports and ingests segments."""

    _rebuilt: ClassVar[tuple[str, ...]] = ("_exported", "_received", "_spaces_digest")
    _exported: _Exported | None = None
    _received: ReceivedSegment | None = None
    _spaces_digest: str | None = None
    _n_added = 0
    """How many steps were added. Ctrl-C may leave it too low: :meth:`export_segment` corrects that."""
    _has_segments = True
    _segment_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that segments contain. If empty, all of ``_saved_fields``."""
    n_envs: int

    def export_segment(
        self,
        *,
        priorities: bool = False,
        policy_version: int | None = None,
        extra: Mapping[str, Any] | None = None,
        restart: bool = False,
        everything: bool = False,
    ) -> bytes:
        """Export all steps since the last export as bytes, for :meth:`ingest_segment` of another buffer.

        The first segment of a buffer contains all its steps. Steps that were overwritten before the export are left
        out.

        :param priorities: Include the priorities of a prioritized buffer. Without them, transitions get the largest
            priority of the receiving buffer, as new transitions do.
        :param policy_version: Your version number of the policy that made the steps.
        :param extra: Your own values: numbers, strings, arrays, and lists and dicts of them.
        :param restart: For a receiver that has not ingested the earlier segments: include all reference frames and
            dictionaries, and count segments from 0 again.
        :param everything: Export all steps in the buffer, as the first segment does. Implies ``restart``.
        """
        with self._lock.held:
            self._check_segments()
            if getattr(self, "generator_ready", False):
                raise SegmentError("get() has reordered the rollout: export it before you call get().")
            sent, n_new = self._not_exported(restart, everything)
            n_steps = min(n_new, self.buffer_size - int(self._shares_slots))
            state, known = self._segment_state(n_steps, sent.known, priorities)
            header = {
                "version": SEGMENT_VERSION,
                "library": __version__,
                "kind": self._segment_kind(),
                "spaces": self._digest_of_spaces(),
                "space": repr(self.observation_space)[:200],
                "n_envs": self.n_envs,
                "columns": self._n_columns,
                "n_steps": n_steps,
                "stream": sent.stream,
                "sequence": sent.sequence,
                "first_step": sent.n_steps + n_new - n_steps,
                "policy_version": None if policy_version is None else int(policy_version),
                "extra": encode(dict(extra or {}), "extra"),
            }
            plain, arrays = flat(state)
            data = container.pack({"segment": header, "state": plain}, arrays)
            total = sent.n_steps + n_new
            self._exported = _Exported(sent.stream, self.pos, self._n_added, sent.sequence + 1, total, known)
        return data

    def _not_exported(self, restart: bool, everything: bool) -> tuple[_Exported, int]:
        """What was exported before, and how many steps were added since."""
        is_replay, sent = isinstance(self, ReplayBuffer), self._exported
        if sent is None or everything:
            n_steps = self.size() if is_replay else self.pos
            return _Exported(secrets.token_hex(8), self.pos, self._n_added), n_steps
        n_steps = self.pos - sent.pos
        if is_replay:
            # The position is right even after Ctrl-C. The count tells how often the buffer wrapped around since.
            counted = self._n_added - sent.n_added
            n_steps = counted + (n_steps - counted) % self.buffer_size
        if restart:
            sent = _Exported(secrets.token_hex(8), sent.pos, sent.n_added)
        return sent, n_steps

    @property
    def _shares_slots(self) -> bool:
        """Whether the next observation of a step is the observation in the next slot (``optimize_memory_usage``)."""
        return isinstance(self, ReplayBuffer) and self._n_columns == 1

    def _segment_state(
        self, n_steps: int, known: dict[str, set[str]], priorities: bool
    ) -> tuple[dict[str, Any], dict[str, set[str]]]:
        """The newest steps, and the references that the receiver will have then. It has those in ``known`` now."""
        if n_steps == 0:
            return {"fields": {}, "stores": {}}, known
        slots = (self.pos - n_steps + np.arange(n_steps)) % self.buffer_size
        columns = [np.append(slots, self.pos)] if self._shares_slots else [slots] * self._n_columns
        exported = {
            key: segments.export_steps(store, columns, known.get(key, set())) for key, store in self._stores.items()
        }
        state = {
            "fields": {name: self._field_rows(name, slots) for name in self._segment_fields or self._saved_fields},
            "stores": {key: part for key, (part, _) in exported.items()},
            **self._further_segment_state(slots, priorities),
        }
        return state, {key: references for key, (_, references) in exported.items()}

    def _n_unsent(self) -> int:
        """How many steps were added since the last export."""
        return self._n_added - (0 if self._exported is None else self._exported.n_added)

    def ingest_segment(self, data: bytes | bytearray | memoryview | npt.NDArray[np.uint8]) -> SegmentInfo:
        """Append the steps of a segment that another buffer with the same spaces exported.

        The result is the same as with ``add()``, but compressed observations are copied without decoding them. Safe for
        untrusted bytes: either the whole segment is appended, or an error is raised and nothing changes.

        Ingest the segments of one sender in order. A segment that was ingested before is ignored. After a missing
        segment, or from another sender, the steps begin new episodes: see :attr:`SegmentInfo.continues`.
        """
        with self._opened(data) as (header, segment), self._lock.held:
            self._check_segments()
            last = self._received
            last = last if last is not None and last.stream == header.stream else None
            if last is not None and header.sequence <= last.sequence:
                return header.info(0, 0, True)
            where = header.first_step, self.pos, self._n_added
            continues = last is not None and where == (last.n_steps, last.pos, last.n_added)
            n_steps, contents = header.first_step + header.n_steps, {} if last is None else last.contents
            received = ReceivedSegment(header.stream, header.sequence, n_steps, contents)
            self._append_segment(segment, header.n_steps, header.n_columns, continues, received)
        return header.info(header.n_steps, header.n_steps * self.n_envs, continues)

    @contextmanager
    def _opened(
        self, data: bytes | bytearray | memoryview | npt.NDArray[np.uint8]
    ) -> Iterator[tuple[SegmentHeader, SavedState]]:
        """The header and the contents of a segment for this buffer."""
        with as_corrupt(_NAME):
            file = container.unpack(bytes(data), _NAME, _MOST_ZEROS)
            header, state = file.meta.get("segment"), file.meta.get("state")
            if not isinstance(header, dict) or not isinstance(state, dict):
                raise FileFormatError("These bytes are a saved buffer, not a segment: use load().")
            checked = SavedState(file, header)
            self._check_header(checked)
            yield SegmentHeader.read(checked), SavedState(file, state)

    def _append_segment(
        self, segment: SavedState, n_steps: int, n_columns: int, continues: bool, received: ReceivedSegment
    ) -> None:
        """Append steps, and remember ``received``. Its ``contents`` are at first those of the previous segment."""
        self._check_room(n_steps, continues)
        has_next = isinstance(self, ReplayBuffer)
        # If a replay buffer has a single column, the last next observation follows the observations.
        n_rows = [n_steps + 1] if has_next and n_columns == 1 else [n_steps] * n_columns
        rows, further, observations = {}, None, {}
        if n_steps:
            for name in self._segment_fields or self._saved_fields:
                like = self._field_rows(name, np.arange(0))
                rows[name] = segment.part("fields").array(name, like.dtype, (n_steps, *like.shape[1:]))
            further = self._checked_further_state(segment, n_steps)
            for key, store in self._stores.items():
                part = segment.part("stores").part(key)
                observations[key] = segments.receive(store, part, n_rows, received.contents.get(key, {}))
        # Nothing has changed so far. From here on nothing fails.
        with uninterrupted():
            if not continues:
                self._end_episodes()
            if n_steps:
                for key, found in observations.items():
                    segments.place(self._stores[key], segments.as_columns(found, self._n_columns, has_next), self.pos)
                kept = min(n_steps, self.buffer_size)
                slots = (self.pos + np.arange(n_steps - kept, n_steps)) % self.buffer_size
                self._place_rows(slots, {name: row[n_steps - kept :] for name, row in rows.items()})
                self._complete_steps(n_steps, rows, further)
                self._n_added += n_steps
                received.contents = {key: found.contents for key, found in observations.items()}
            received.pos, received.n_added = self.pos, self._n_added
            self._received = received

    # What differs between classes

    _n_columns: int

    def _segment_kind(self) -> str:
        return "replay" if isinstance(self, ReplayBuffer) else "rollout"

    def _place_rows(self, slots: Indices, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write rows of fields. Doing it twice does no harm."""
        for name, row in rows.items():
            getattr(self, name)[slots] = row

    def _further_segment_state(self, slots: Indices, priorities: bool) -> State:
        """What a derived class exports besides fields and observations."""
        return {}

    def _checked_further_state(self, segment: SavedState, n_steps: int) -> Any:
        """Read and check the result of :meth:`_further_segment_state`."""
        return None

    def _complete_steps(self, n_steps: int, rows: Mapping[str, npt.NDArray[Any]], further: Any) -> None:
        """Store ``further``, and advance the position past steps whose fields and observations are stored already."""
        end = self.pos + n_steps
        self.full = self.full or end >= self.buffer_size
        self.pos = end % self.buffer_size if isinstance(self, ReplayBuffer) else end

    def _check_room(self, n_steps: int, continues: bool) -> None:
        """Raise an error if ``n_steps`` more steps do not fit, or do not continue the last ones where they must."""

    def _end_episodes(self) -> None:
        """Mark the newest transitions as the ends of their episodes, because the next ones do not continue them."""

    # Whether a segment is for this buffer

    def _check_segments(self) -> None:
        if not self._has_segments:
            raise SegmentError(
                f"{type(self).__name__} can neither export nor ingest segments. Use a buffer in host memory that "
                "samples transitions, such as CompressedReplayBuffer."
            )
        if self._folder is not None:
            self._folder.before_adding(self)

    def _digest_of_spaces(self) -> str:
        if self._spaces_digest is None:
            spaces = [encode(space, "The space") for space in (self.observation_space, self.action_space)]
            self._spaces_digest = xxhash.xxh3_64_hexdigest(json.dumps(spaces, sort_keys=True).encode())
        return self._spaces_digest

    def _check_header(self, header: SavedState) -> None:
        """Raise an error if this library cannot read the segment, or it is for other buffers."""
        version = header.value("version")
        if type(version) is not int or version < 1:
            raise CorruptDataError(f"{_NAME} is corrupt: its version is {version!r}.")
        if version > SEGMENT_VERSION:
            raise FileFormatError(
                f"The segment has version {version}, written by sb3-extra-buffers {header.value('library')}, but this "
                f"library reads versions up to {SEGMENT_VERSION}. Install the same version of sb3-extra-buffers "
                "everywhere."
            )
        if header.value("kind") != self._segment_kind():
            raise SegmentError(
                f"The segment is from a {header.value('kind')} buffer, but {type(self).__name__} is a "
                f"{self._segment_kind()} buffer."
            )
        if header.value("spaces") != self._digest_of_spaces():
            raise SegmentError(
                f"The segment is for other spaces. Its observations are {header.value('space')}, those of this buffer "
                f"{self.observation_space!r}. If these look the same, the action space or the bounds differ."
            )
        if header.value("n_envs") != self.n_envs:
            raise SegmentError(
                f"The segment is from {header.value('n_envs')} environments, but this buffer has n_envs={self.n_envs}."
            )
