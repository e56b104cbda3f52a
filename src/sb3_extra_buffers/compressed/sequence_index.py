"""The index of steps where sequences may begin. Each step updates it, so drawing is fast however large the buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.anonymous_memory import zeros
from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compressed.arguments import EpisodeEnd
from sb3_extra_buffers.compressed.drawing import draw
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError
from sb3_extra_buffers.state import SavedState, State


@dataclass(frozen=True)
class SequenceShape:
    """A sequence is ``burn_in + length + bootstrap_steps`` consecutive steps of one environment.

    :param stride: The least distance between the first steps of two sequences, in steps.
    """

    length: int
    burn_in: int
    bootstrap_steps: int
    stride: int
    at_episode_end: EpisodeEnd

    @classmethod
    def from_arguments(
        cls, length: int, burn_in: int, bootstrap_steps: int, overlap: int | None, at_episode_end: EpisodeEnd
    ) -> SequenceShape:
        if length < 1:
            raise ConfigurationError(f"length must be at least 1, not {length}.")
        if burn_in < 0 or bootstrap_steps < 0:
            raise ConfigurationError(
                f"burn_in and bootstrap_steps must not be negative, but are {burn_in} and {bootstrap_steps}."
            )
        total = burn_in + length + bootstrap_steps
        overlap = total - 1 if overlap is None else overlap
        if not 0 <= overlap < total:
            raise ConfigurationError(
                f"overlap must be from 0 to {total - 1} for sequences of {total} steps (burn_in + length + "
                f"bootstrap_steps), not {overlap}. Leave it out to begin a sequence at every step."
            )
        if at_episode_end not in get_args(EpisodeEnd):
            raise ConfigurationError(f"at_episode_end must be 'pad', 'stop' or 'cross', not {at_episode_end!r}.")
        return cls(length, burn_in, bootstrap_steps, total - overlap, at_episode_end)

    @property
    def total(self) -> int:
        """The number of steps in a sequence."""
        return self.burn_in + self.length + self.bootstrap_steps


class Changes(NamedTuple):
    """The places, ``slot * n_envs + env``, where sequences may no longer begin after a step, and the new ones."""

    removed: Indices
    added: Indices


class _Queues:
    """A queue of slots for each environment, oldest first, in a ring."""

    def __init__(self, n_slots: int, n_envs: int) -> None:
        # One more than slots: so a step never overwrites what it removes, and Ctrl-C can be undone by the counts alone.
        self._slots = zeros((n_envs, n_slots + 1), np.dtype(np.uint32))
        self.removed: Indices = np.zeros(n_envs, dtype=np.int64)
        """How many slots have left each queue so far."""
        self.added: Indices = np.zeros(n_envs, dtype=np.int64)
        """How many slots have entered each queue so far."""

    @property
    def counts(self) -> Indices:
        return self.added - self.removed

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def append(self, envs: Indices, slot: int) -> None:
        """Append the same slot to the queues of some environments."""
        self._slots[envs, self.added[envs] % self._slots.shape[1]] = slot
        self.added[envs] += 1

    def remove(self, slot: int) -> Indices:
        """Remove ``slot``, the oldest of the buffer, from all queues, and return the environments that had it."""
        fronts = self._slots[np.arange(len(self._slots)), self.removed % self._slots.shape[1]]
        envs = np.flatnonzero((fronts == slot) & (self.added > self.removed))
        self.removed[envs] += 1
        return envs

    def at(self, envs: Indices, ranks: Indices) -> Indices:
        """The slot with each rank, from 0 for the oldest, in the queue of each environment."""
        slots: Indices = self._slots[envs, (self.removed[envs] + ranks) % self._slots.shape[1]].astype(np.int64)
        return slots

    def of_env(self, env: int) -> Indices:
        n = int(self.counts[env])
        return self.at(np.full(n, env), np.arange(n))

    def state(self) -> State:
        n_envs = len(self._slots)
        slots = np.concatenate([self.of_env(env) for env in range(n_envs)]).astype(np.uint32)
        return {"slots": slots, "counts": self.counts}

    def restore(self, state: SavedState) -> None:
        n_envs, n_slots = self._slots.shape[0], self._slots.shape[1] - 1
        counts = state.array("counts", np.int64, (n_envs,))
        slots = state.array("slots", np.uint32, (None,))
        if counts.min() < 0 or counts.max() > n_slots or counts.sum() != len(slots):
            raise state.error("counts", f"does not add up to {len(slots)}")
        if slots.max(initial=0) >= n_slots:
            raise state.error("slots", f"must be below {n_slots}")
        self.clear()
        for env, part in enumerate(np.split(slots, np.cumsum(counts)[:-1])):
            self._slots[env, : len(part)] = part
        self.added[:] = counts

    def clear(self) -> None:
        self.removed[:] = 0
        self.added[:] = 0


class SequenceIndex:
    """The *anchors* of a buffer: the steps at which a sequence may begin.

    Steps are numbered from 0, and a step has the same number in all environments. Numbers are never reused.

    :param online: Also keep a queue of sequences that do not overlap, each to be sampled once.
    """

    def __init__(self, shape: SequenceShape, n_slots: int, n_envs: int, online: bool) -> None:
        self.shape, self.n_slots, self.n_envs = shape, n_slots, n_envs
        self.anchors = _Queues(n_slots, n_envs)
        self.online = _Queues(n_slots, n_envs) if online else None
        self._queues = (self.anchors,) if self.online is None else (self.anchors, self.online)
        self.n_added = 0
        """How many steps have been added so far."""
        self._n_cleared = 0
        """The value of ``n_added`` when the buffer was last cleared."""
        self._unbroken: Indices = np.zeros(n_envs, dtype=np.int64)
        """For each environment, how many steps up to the newest have followed one another without a gap."""
        self._is_open: npt.NDArray[np.bool_] = np.zeros(n_envs, dtype=np.bool_)
        """For each environment, whether the episode of the newest step may continue."""
        self._undo_state: tuple[Any, ...] | None = None

    @property
    def n_stored(self) -> int:
        """How many steps of each environment the buffer holds."""
        return min(self.n_added - self._n_cleared, self.n_slots)

    @property
    def nbytes(self) -> int:
        return sum(queue.nbytes for queue in self._queues)

    def begin_step(self) -> None:
        """Forget what :meth:`remember_or_undo` has remembered of the previous step."""
        self._undo_state = None

    def remember_or_undo(self) -> None:
        """Remember the state before a step is added. If Ctrl-C makes the buffer add it again, return to that state."""
        if self._undo_state is None:
            counts = [(queue, queue.removed.copy(), queue.added.copy()) for queue in self._queues]
            self._undo_state = counts, self.n_added, self._unbroken.copy(), self._is_open.copy()
            return
        counts, self.n_added, unbroken, is_open = self._undo_state
        self._unbroken[:], self._is_open[:] = unbroken, is_open
        for queue, removed, added in counts:
            queue.removed[:], queue.added[:] = removed, added

    def add_step(
        self, slot: int, episode_steps: npt.NDArray[np.uint32], is_gap: npt.NDArray[Any], is_end: npt.NDArray[Any]
    ) -> Changes:
        """Add the step that was stored in ``slot``.

        :param episode_steps: The number of each step in its episode, from 0, for all slots and environments.
        :param is_gap: For each environment, whether the step does not follow the previous one.
        :param is_end: For each environment, whether the step is the last of its episode.
        """
        shape, total = self.shape, self.shape.total
        removed = np.zeros(0, dtype=np.int64)
        if self.n_stored == self.n_slots:
            removed = self.anchors.remove(slot)
            if self.online is not None:
                self.online.remove(slot)
        added: list[Indices] = []
        now = episode_steps[slot]
        if shape.at_episode_end == "pad":
            for env in np.flatnonzero((now == 0) & self._is_open).tolist():  # a gap, or an end that was marked later
                added += self._close_episode(env, (slot - 1) % self.n_slots, episode_steps)
        self.n_added += 1
        np.add(np.where(is_gap, 0, self._unbroken), 1, out=self._unbroken)
        crosses = shape.at_episode_end == "cross"
        n_steps = self._unbroken if crosses else now.astype(np.int64) + 1  # without a gap
        whole = np.flatnonzero(n_steps >= total)
        if len(whole):
            first = (slot - total + 1) % self.n_slots
            begins = whole
            if shape.stride > 1:
                numbers = np.full(len(whole), self.n_added) if crosses else n_steps[whole]
                begins = whole[(numbers - total) % shape.stride == 0]
            self.anchors.append(begins, first)
            added.append(first * self.n_envs + begins)
            if self.online is not None:
                self.online.append(whole[n_steps[whole] % total == 0], first)
        if shape.at_episode_end == "pad":
            for env in np.flatnonzero(is_end).tolist():
                added += self._close_episode(env, slot, episode_steps)
        self._is_open[:] = ~is_end.astype(np.bool_)
        return Changes(slot * self.n_envs + removed, np.concatenate(added) if added else removed[:0])

    def _close_episode(self, env: int, slot: int, episode_steps: npt.NDArray[np.uint32]) -> list[Indices]:
        """Add the anchors of the padded sequences of an episode, whose last step is in ``slot``. Returns their places.

        At least one step after the burn-in is in the episode. The steps of these sequences are still stored, because a
        buffer has room for a whole sequence.
        """
        shape, last = self.shape, int(episode_steps[slot, env])
        envs, added = np.array([env]), []
        lowest = max(0, last - shape.total + 2)  # earlier ones need no padding
        for step in range(-(-lowest // shape.stride) * shape.stride, last - shape.burn_in + 1, shape.stride):
            begin = (slot - last + step) % self.n_slots
            self.anchors.append(envs, begin)
            added.append(begin * self.n_envs + envs)
        first = last // shape.total * shape.total
        if self.online is not None and lowest <= first <= last - shape.burn_in:
            self.online.append(envs, (slot - last + first) % self.n_slots)
        return added

    def draw(self, n: int) -> tuple[Indices, Indices]:
        """Draw ``n`` anchors uniformly. Returns their slots and environments."""
        counts = self.anchors.counts
        ends = np.cumsum(counts)
        ranks = draw(int(ends[-1]), n)
        envs = np.searchsorted(ends, ranks, side="right")
        return self.anchors.at(envs, ranks - (ends - counts)[envs]), envs

    def take_online(self, n: int, pos: int) -> tuple[Indices, Indices]:
        """Take up to ``n`` sequences from the online queue, oldest first. Returns their slots and environments."""
        queue, taken = self.online, list[tuple[int, int]]()
        if queue is None:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        every_env = np.arange(self.n_envs)
        while len(taken) < n and queue.counts.any():
            slots = queue.at(every_env, np.zeros_like(every_env))
            ages = np.where(queue.counts > 0, (pos - 1 - slots) % self.n_slots, -1)
            env = int(ages.argmax())
            taken.append((int(slots[env]), env))
            queue.removed[env] += 1
        slots_taken, envs_taken = np.array(taken, dtype=np.int64).reshape(-1, 2).T
        return slots_taken, envs_taken

    def clear(self) -> None:
        self._n_cleared = self.n_added
        self._unbroken[:], self._is_open[:] = 0, False
        for queue in self._queues:
            queue.clear()

    def state(self) -> State:
        return {
            "n_added": self.n_added,
            "n_cleared": self._n_cleared,
            "unbroken": self._unbroken,
            "is_open": self._is_open,
            "anchors": self.anchors.state(),
            "online": {} if self.online is None else self.online.state(),
        }

    def restore(self, state: SavedState, pos: int, n_stored: int) -> None:
        self.n_added = state.integer("n_added")
        self._n_cleared = state.integer("n_cleared", 0, self.n_added)
        if self.n_stored != n_stored:
            raise state.error("n_added", f"must be {n_stored} more than n_cleared")
        self._unbroken = state.array("unbroken", np.int64, (self.n_envs,)).copy()
        if ((self._unbroken < 0) | (self._unbroken > self.n_added - self._n_cleared)).any():
            raise state.error("unbroken", "has more steps than were added")
        self._is_open = state.array("is_open", np.bool_, (self.n_envs,)).copy()
        self.anchors.restore(state.part("anchors"))
        if self.online is not None:
            self.online.restore(state.part("online"))
        try:
            self.check(pos)
        except CorruptDataError as error:
            raise state.error("anchors", f"contradict the buffer: {error}") from error

    def check(self, pos: int) -> None:
        """Raise :class:`~sb3_extra_buffers.errors.CorruptDataError` unless all queued slots are in use."""
        for queue in self._queues:
            for env in range(self.n_envs):
                ages = (pos - 1 - queue.of_env(env)) % self.n_slots
                if (np.diff(ages) >= 0).any() or ages.max(initial=0) >= max(self.n_stored, 1):
                    raise CorruptDataError(f"Sequences of environment {env} begin at steps that are not stored.")
                if self.shape.at_episode_end != "pad" and ages.min(initial=self.n_slots) < self.shape.total - 1:
                    raise CorruptDataError(f"Sequences of environment {env} go past the newest step.")
