"""The learner's side of shards: what they hold, batches requested ahead, and priorities."""

from __future__ import annotations

import logging
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.compressed.replay_buffer import CompressedReplayBuffer
from sb3_extra_buffers.compressed.segments import ReceivedSegment
from sb3_extra_buffers.distributed.limits import MAX_FAILURES
from sb3_extra_buffers.distributed.parts import Fields, Parts, draw_uniformly, indices_of, numbers_and_places
from sb3_extra_buffers.distributed.remote_part import RemotePart
from sb3_extra_buffers.distributed.shard import Drawn, ShardPlan, Target
from sb3_extra_buffers.distributed.shard_calls import ShardCalls
from sb3_extra_buffers.distributed.shard_transport import Call, Request, ShardDied, ShardTransport
from sb3_extra_buffers.distributed.stamps import are_current, stamped, unstamped
from sb3_extra_buffers.errors import EmptyBufferError, ExtraBuffersError, WorkerError
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.storage.blocks import fill_from
from sb3_extra_buffers.storage.outputs import OutputPool

logger = logging.getLogger("sb3_extra_buffers")


class Shards(ShardCalls):
    """The parts of a buffer in shards, sampled together.

    :param template: An empty buffer of the parts' class.
    :param prefetch: How many batches to request ahead.
    :param on_loss: When a shard dies: ``"report"`` logs a warning, ``"raise"`` raises a ``WorkerError``.
    """

    def __init__(
        self, transport: ShardTransport, plans: list[ShardPlan], template: Any, prefetch: int, on_loss: str
    ) -> None:
        super().__init__(transport, len(plans))
        self._plans, self._on_loss, self._prefetch = plans, on_loss, prefetch
        self._template = Parts([template], template.device, OutputPool(plans[0].n_batches, shared=True))
        n = len(plans)
        self._bounds = np.cumsum([0, *(len(plan.numbers) for plan in plans)])
        """The first part of each shard, then the number of parts."""
        self._shard_of = np.repeat(np.arange(n), np.diff(self._bounds))
        """The shard of each part."""
        n_slots = plans[0].arguments["buffer_size"] // template.n_envs
        self.parts = [RemotePart(self, part, template, n_slots) for part in range(len(self._shard_of))]
        self._totals = np.zeros(n)
        """The sum of priorities in each shard, as far as the learner knows."""
        self._added: list[deque[tuple[int, float]]] = [deque() for _ in plans]
        """For each shard, the segments that no reply includes yet: number of the message, and sum of the priorities."""
        self._refused = [0] * n
        """How many segments each shard has refused, as far as the learner knows."""
        self._unknown: set[int] = set()
        """Restarted shards whose contents are unknown, because Ctrl-C came before they reported them."""
        self._queue: deque[Request] = deque()
        """Batches that were requested ahead."""
        self._writes_to_learner = False
        """Whether all shards of the last batch wrote their observations to the learner's memory."""
        self._saved: list[Path] = []
        """The files of the last save."""
        self.max_priority = 1.0
        self.n_lost = 0
        """Transitions lost with dead shards."""
        self.lost_fraction = 0.0
        """The fraction of all transitions that was lost with the last dead shard."""
        self.outputs = self._template.outputs
        self.added: dict[int, CompressedReplayBuffer] = {}
        """Small buffers of steps that were added to parts but not sent yet, by the number of the part."""
        transport.start(plans)
        for shard in range(n):
            self._set_states(shard, self._result(shard, self._call(shard, "states")))

    # Dead shards

    def _replace(self, shard: int, reason: str) -> None:
        """Restart a dead shard, and restore it from its files if there are any. Report the loss as ``on_loss`` says."""
        before = sum(part.size() for part in self.parts)
        while True:
            self._failures[shard] += 1
            if self._failures[shard] >= MAX_FAILURES:
                raise WorkerError(
                    f"Shard {shard} died {MAX_FAILURES} times without a reply in between. The last reason: {reason}"
                )
            self._restart(shard)
            failures = self._failures[shard]
            try:
                self._reload(shard)
                states = self._result(shard, self._call(shard, "states"))
            except ShardDied as death:
                self._failures[shard], reason = failures, str(death)
            else:
                break
        self._set_states(shard, states)
        self.n_lost -= sum(part.size() for part in self._parts_of(shard)) * self.parts[0].n_envs
        self.lost_fraction = max(before - sum(part.size() for part in self.parts), 0) / max(before, 1)
        message = f"Shard {shard} died, and {self.lost_fraction:.1%} of all transitions are lost: {reason}"
        if self._on_loss == "raise":
            raise WorkerError(message)
        logger.warning("%s", message)

    def _restart(self, shard: int) -> None:
        """Replace the process of a shard. Until the shard reports its contents, it counts as empty."""
        with uninterrupted():
            self._unknown.add(shard)
            for part in self._parts_of(shard):
                self.n_lost += part.size() * part.n_envs
                part.pos, part.full, part.starts_over = 0, False, True
            self._restarts[shard] += 1
            self._transport.restart(shard)
            self._unconfirmed[shard].clear()
            self._added[shard].clear()
            self._totals[shard] = self._refused[shard] = 0

    def _reload(self, shard: int) -> None:
        """Load the last save into a restarted shard, unless the shard is on disk, and so has restored itself."""
        if self._saved and self._plans[shard].path is None:
            try:
                self._result(shard, self._call(shard, "load", self._files(self._saved)[shard]))
            except (ExtraBuffersError, OSError) as error:
                logger.warning("Shard %d could not be restored from the last save: %s", shard, error)

    def _parts_of(self, shard: int) -> list[RemotePart]:
        return [self.parts[number] for number in self._plans[shard].numbers]

    def _set_states(self, shard: int, states: list[tuple[int, bool]]) -> None:
        for part, state in zip(self._parts_of(shard), states, strict=True):
            part.pos, part.full = state
        self._unknown.discard(shard)
        # Until the next reply, the learner assumes that all transitions have the priority of new ones.
        n = sum(part.size() * part.n_envs for part in self._parts_of(shard))
        self._totals[shard] = n * self._new_priority()

    def refresh(self) -> None:
        """Ask all shards what they hold, for instance after they have loaded files."""
        self._queue.clear()
        handles = [self._call(shard, "states") for shard in range(len(self._plans))]
        for shard, handle in enumerate(handles):
            states = self._result_or_none(shard, handle)
            if states is not None:  # else the shard died, and _replace() has set the states
                self._set_states(shard, states)
                self._added[shard].clear()

    def send_added(self) -> None:
        """Send the steps that wait in ``added`` to their shards."""
        for number, added in self.added.items():
            if added._n_unsent():
                self.wait_for_room(number)
                with uninterrupted():  # so that every exported segment is sent
                    self.parts[number].ingest_segment(added.export_segment())

    def wait_for_room(self, number: int) -> None:
        """Wait until the shard of part ``number`` can receive a segment. Replaces the shard if it died."""
        self._wait_for_room(int(self._shard_of[number]))
        if self._unknown:
            self.refresh()

    def send_segment(self, number: int, data: Bytes, before: ReceivedSegment | None, n_transitions: int) -> None:
        """Send a segment to part ``number``.

        :param before: The previous segment, if the shard may lack its references.
        """
        shard = int(self._shard_of[number])
        priority = self.max_priority if self._template.is_prioritized else None
        self._send(shard, "ingest", number - int(self._bounds[shard]), data, before, priority)
        added = n_transitions * self._new_priority()
        self._totals[shard] += added
        self._added[shard].append((self._n_messages[shard], added))

    def _new_priority(self) -> float:
        """The priority of new transitions, with ``alpha`` applied."""
        return float(self.max_priority**self._template.first.alpha) if self._template.is_prioritized else 1.0

    # Batches

    def sample(self, batch_size: int, env: VecNormalize | None) -> Any:
        try:
            return self._sample(batch_size, env)
        except EmptyBufferError:
            self.ask_all("check_folders")  # if one cannot be used, that is the reason
            raise

    def _sample(self, batch_size: int, env: VecNormalize | None) -> Any:
        self.send_added()
        if self._unknown:
            self.refresh()
        if self._queue and self._queue[0].n != batch_size:
            self._queue.clear()
        self._ask_ahead(batch_size)
        request = self._queue.popleft()
        while (drawn := self._replies(request)) is None:
            (request,) = self._request(batch_size, 1)
        if self._prefetch > 1:  # so that shards work while the caller uses this batch
            self._ask_ahead(batch_size)
        return self._batch(request, drawn, env)

    def _ask_ahead(self, batch_size: int) -> None:
        """Request as many batches ahead as fit into ``prefetch``."""
        # Asking for several batches in one message saves time, but enough batches must stay queued until the next ones
        # are ready: half of them if shards reply through Ray, three quarters if they write to the learner's memory.
        at_once = max(self._prefetch // (4 if self._writes_to_learner else 2), 1)
        while len(self._queue) + at_once <= self._prefetch:
            self._queue += self._request(batch_size, at_once)

    def _request(self, batch_size: int, n_batches: int) -> list[Request]:
        """Draw the transitions of some batches, and request them from the shards."""
        draw = self._draw_by_priority if self._template.is_prioritized else self._draw_uniformly
        calls = [
            Call(*state) for state in zip(range(len(self._plans)), self._restarts, self._totals.tolist(), strict=True)
        ]
        requests: list[Request] = []
        for _ in range(n_batches):
            shares = draw(batch_size)
            request = Request(batch_size, self._template.memory_for(batch_size), [])
            address, first = request.memory.share(), 0
            for call, asked in zip(calls, shares, strict=True):
                if n := len(asked[0]):
                    request.pieces.append((call, len(call.asked)))
                    call.asked.append((asked, None if address is None else Target(address, batch_size, first)))
                    first += n
            requests.append(request)
        for call in calls:
            if call.asked:
                call.handle = self._call(call.shard, "draw", call.asked)
                call.message = self._n_messages[call.shard]
        return requests

    def _draw_uniformly(self, n: int) -> list[tuple[Any, ...]]:
        """Draw ``n`` transitions. Returns, for each shard, the arguments of :meth:`.Shard.draw`."""
        numbers, slots, envs = draw_uniformly(self.parts, n)
        bounds = np.searchsorted(numbers, self._bounds).tolist()
        return [
            (numbers[low:high] - first, slots[low:high], envs[low:high])
            for first, (low, high) in zip(self._bounds.tolist(), pairwise(bounds), strict=False)
        ]

    def _draw_by_priority(self, n: int) -> list[tuple[Any, ...]]:
        """Draw how many transitions each shard contributes. The shards draw which ones.

        Returns, for each shard, the arguments of :meth:`.Shard.draw`.
        """
        total = self._totals.sum()
        if total == 0:
            raise EmptyBufferError("The buffer is empty: add transitions before sampling from it.")
        positions = np.arange(n) + np.random.random_sample(n)
        fractions = self._totals / total
        ends = n * fractions.cumsum()
        shards = np.minimum(np.searchsorted(ends, positions, side="right"), np.flatnonzero(fractions)[-1])
        bounds = np.searchsorted(shards, np.arange(len(ends) + 1)).tolist()
        # Scale the positions in each shard so that its total is n as well. With a single shard, nothing changes.
        return [
            ((positions[low:high] - begin) / (fraction or 1.0), n)
            for begin, fraction, (low, high) in zip([0.0, *ends[:-1]], fractions, pairwise(bounds), strict=True)
        ]

    def _replies(self, request: Request) -> list[tuple[Call, Drawn]] | None:
        """Wait for the replies to a request; ``None`` if the batch must be drawn again, because a reply is missing."""
        replies = [(call, self._reply(call, place)) for call, place in request.pieces]
        drawn = [(call, reply) for call, reply in replies if reply is not None]
        if len(drawn) < len(replies):
            return None
        request.memory.release()
        self._writes_to_learner = not any(reply.blocks for _, reply in drawn)
        return drawn

    def _reply(self, call: Call, place: int) -> Drawn | None:
        """Wait for the reply of one shard for batch number ``place`` of a call; ``None`` if there is none."""
        shard = call.shard
        if call.replies is None and call.restarts == self._restarts[shard]:
            call.replies = self._result_or_none(shard, call.handle)
        if call.replies is None:
            return None  # the shard died
        reply = call.replies[place]
        if reply is None:  # the shard has fewer transitions than the learner assumed
            if call.restarts == self._restarts[shard]:
                self.refresh()
            return None
        if call.restarts != self._restarts[shard]:
            return reply
        if reply.n_refused > self._refused[shard]:
            logger.warning("Shard %d could not ingest a segment: %s", shard, reply.refusal)
            self._refused[shard] = reply.n_refused
            for part in self._parts_of(shard):  # the shard may lack references
                part.starts_over = True
            self.refresh()
            return reply
        added = self._added[shard]
        while added and added[0][0] <= call.message:
            added.popleft()
        self._totals[shard] = reply.total + sum(priorities for _, priorities in added)
        return reply

    def _batch(self, request: Request, drawn: list[tuple[Call, Drawn]], env: VecNormalize | None) -> Any:
        outs = self._template.batch_in(request.memory, request.n)
        bounds = np.cumsum([0, *(len(reply.fields.actions) for _, reply in drawn)]).tolist()
        rows = [slice(low, high) for low, high in pairwise(bounds)]
        for key, store in self._template.first._stores.items():
            blocks = [reply.blocks.get(key) for _, reply in drawn]
            fill_from(list(zip(rows, blocks, strict=True)), store, outs[key])
        fields: list[Any] = [
            None if values[0] is None else np.concatenate(values)
            for values in zip(*(reply.fields for _, reply in drawn), strict=True)
        ]
        samples = self._template.batch_of(outs, Fields(*fields), env)
        if not self._template.is_prioritized:
            return samples
        values: list[Any] = [reply.priorities for _, reply in drawn]
        if len(self._plans) > 1:
            # The learner chose how many rows each shard contributes, maybe by an outdated sum of priorities. Scale
            # priorities to be proportional to the probabilities with which rows were actually drawn.
            values = [own * call.total / reply.total for own, (call, reply) in zip(values, drawn, strict=True)]
        indices = np.concatenate([self._indices(call, reply) for call, reply in drawn])
        return self._template.weighted(samples, np.concatenate(values), indices)

    # Priorities

    def _indices(self, call: Call, reply: Drawn) -> Indices:
        assert reply.indices is not None
        own, places, generations = reply.indices
        numbers = own + self._bounds[call.shard]
        return stamped(indices_of(self.parts, numbers, places), generations, call.restarts)

    def update(self, indices: Indices, errors: npt.NDArray[np.float64]) -> None:
        """Send new priorities to the shards without waiting for replies. Outdated indices are ignored."""
        priorities = errors + self._template.first.epsilon
        self.max_priority = max(self.max_priority, float(priorities.max(initial=0.0)))
        places, generations, restarts = unstamped(indices)
        numbers, places = numbers_and_places(self.parts, places)
        shards = self._shard_of[numbers]
        for shard in np.unique(shards).tolist():
            self._wait_for_room(shard)
        current = are_current(restarts, np.array(self._restarts)[shards])
        for shard in np.unique(shards[current]).tolist():
            mine = current & (shards == shard)
            own = numbers[mine] - self._bounds[shard], places[mine], generations[mine]
            self._send(shard, "update", own, priorities[mine], self.max_priority)

    def save(self, paths: list[Path]) -> None:
        """Let all shards save their parts, one file each. Later, a dead shard is restored from these files."""
        self.ask_all("save", self._files(paths))
        self._saved = paths

    def load(self, paths: list[Path], max_priority: float) -> None:
        self.ask_all("load", self._files(paths))
        self._saved, self.max_priority = paths, max_priority
        self.refresh()

    def _files(self, paths: list[Path]) -> list[list[str]]:
        """The files of the parts of each shard."""
        return [[str(paths[number]) for number in plan.numbers] for plan in self._plans]

    def reset(self) -> None:
        self.send_added()
        self._saved = []
        self.ask_all("reset")
        self.refresh()

    def close(self) -> None:
        """Flush shards on disk, and stop all shards."""
        self.send_added()
        try:
            self.ask_all("close")
        finally:
            self.stop()

    def stop(self) -> None:
        self._queue.clear()
        super().stop()
