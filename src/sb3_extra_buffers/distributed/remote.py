"""The learner's side of shards: what they hold, requests that are on their way, and batches made from replies."""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.compressed.prioritized_buffer import PrioritizedReplayBufferSamples
from sb3_extra_buffers.compressed.segments import ReceivedSegment
from sb3_extra_buffers.distributed.parts import Fields, Parts, Places, draw_uniformly
from sb3_extra_buffers.distributed.remote_part import RemotePart
from sb3_extra_buffers.distributed.shard import GENERATION_BITS, Drawn, PartState, ShardPlan
from sb3_extra_buffers.distributed.shard_transport import Call, Request, ShardDied, ShardTransport
from sb3_extra_buffers.errors import EmptyBufferError, ExtraBuffersError, WorkerError
from sb3_extra_buffers.storage.blocks import fill_from

logger = logging.getLogger("sb3_extra_buffers")

_SAY_AFTER = 5.0
"""Seconds. A wait that takes longer says what it waits for."""
_MOST_FAILURES = 5
"""A shard that dies so often without one reply in between will not recover."""
_MOST_WAITING = 64
"""Messages to a shard that has not confirmed them yet."""
_PLACE_BITS, _LIFE_BITS = 40, 5
"""Of an index: the place, and how often its shard was started again. In between is how often it was overwritten."""


class Shards:
    """Parts that are in shards. Requests for batches are sent ahead.

    :param template: An empty buffer of the class of the parts.
    :param prefetch: How many batches are requested ahead.
    """

    def __init__(
        self,
        transport: ShardTransport,
        plans: list[ShardPlan],
        template: Any,
        n_slots: int,
        device: th.device,
        prefetch: int,
        on_loss: str,
    ) -> None:
        self._transport, self._plans, self._on_loss, self._prefetch = transport, plans, on_loss, prefetch
        self._template = Parts([template], device)
        n_parts = sum(len(plan.numbers) for plan in plans)
        self.parts = [RemotePart(self._send_segment, number, template, n_slots) for number in range(n_parts)]
        self._homes = np.zeros(n_parts, dtype=np.int64)
        """The shard of each part."""
        self._own_numbers = np.zeros(n_parts, dtype=np.int64)
        for shard, plan in enumerate(plans):
            self._homes[plan.numbers] = shard
            self._own_numbers[plan.numbers] = np.arange(len(plan.numbers))
        n = len(plans)
        self._lives = [0] * n
        """How often each shard was started again."""
        self._failures = [0] * n
        self._n_messages = [0] * n
        self._unconfirmed: list[deque[tuple[int, Any]]] = [deque() for _ in plans]
        self._totals = np.zeros(n)
        """The sums of priorities, as far as they are known."""
        self._added: list[deque[tuple[int, float]]] = [deque() for _ in plans]
        """What the totals do not include yet: the numbers of messages, and priorities that they have added."""
        self._refused = [0] * n
        self._queue: deque[tuple[int, list[Request]]] = deque()
        self._saved: list[Path] = []
        """The files of the last save."""
        self.max_priority = 1.0
        self.n_lost = 0
        """Transitions that were lost with shards."""
        self.lost_fraction = 0.0
        """Which fraction of all transitions was lost when a shard died the last time."""
        self.n_late = 0
        """Priorities that came too late, because their shard was started again. Shards drop others themselves."""
        transport.start(plans)
        for shard in range(n):
            self._take_states(shard, self._result(shard, self._call(shard, "states")))

    @property
    def outputs(self) -> Any:
        return self._template.outputs

    # Messages

    def _call(self, shard: int, method: str, *arguments: Any) -> Any:
        self._n_messages[shard] += 1
        return self._transport.call(shard, method, *arguments)

    def _send(self, shard: int, method: str, *arguments: Any) -> None:
        """A call whose result nobody needs. If too many are on the way, wait for the oldest."""
        waiting = self._unconfirmed[shard]
        waiting.append((self._lives[shard], self._call(shard, method, *arguments)))
        while len(waiting) > _MOST_WAITING:
            life, handle = waiting.popleft()
            if life == self._lives[shard]:
                self._try(shard, handle)

    def _result(self, shard: int, handle: Any) -> Any:
        began = time.monotonic()
        while True:
            try:
                result = self._transport.result(handle, _SAY_AFTER)
            except TimeoutError:
                logger.warning("Waiting for shard %d since %.0f s", shard, time.monotonic() - began)
                continue
            self._failures[shard] = 0
            return result

    def _try(self, shard: int, handle: Any) -> Any:
        """The result, or ``None`` if the shard died, which is replaced then."""
        try:
            return self._result(shard, handle)
        except ShardDied as death:
            self._lose(shard, str(death))
            return None

    def ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all shards, and wait for the results."""
        handles = [self._call(shard, method, *arguments) for shard in range(len(self._plans))]
        return [self._finished(shard, handle, method) for shard, handle in enumerate(handles)]

    def _finished(self, shard: int, handle: Any, method: str) -> Any:
        try:
            return self._result(shard, handle)
        except ShardDied as death:
            self._lose(shard, str(death))
            raise WorkerError(f"Shard {shard} died during {method}(), and was started again: {death}") from death

    def _lose(self, shard: int, reason: str) -> None:
        """Start a shard again. It has what its files have, if there are any."""
        before = sum(part.size() for part in self.parts)
        while True:
            self._failures[shard] += 1
            if self._failures[shard] >= _MOST_FAILURES:
                raise WorkerError(
                    f"Shard {shard} died {_MOST_FAILURES} times without one reply in between. The last time: {reason}"
                )
            self._lives[shard] += 1
            self._transport.restart(shard)
            self._unconfirmed[shard].clear()
            self._added[shard].clear()
            self._refused[shard] = 0
            failures = self._failures[shard]
            try:
                self._reload(shard)
                states = self._result(shard, self._call(shard, "states"))
            except ShardDied as death:
                self._failures[shard], reason = failures, str(death)
                continue
            break
        self._take_states(shard, states)
        for part in self._parts_of(shard):
            part.is_new = True
        lost = before - sum(part.size() for part in self.parts)
        self.n_lost += lost * self.parts[0].n_envs
        self.lost_fraction = lost / max(before, 1)
        message = f"Shard {shard} died, and {self.lost_fraction:.1%} of all transitions are lost: {reason}"
        if self._on_loss == "raise":
            raise WorkerError(message)
        logger.warning("%s", message)

    def _reload(self, shard: int) -> None:
        """Let a new shard have the last save, unless it has files of its own."""
        if self._saved and self._plans[shard].path is None:
            paths = [str(self._saved[number]) for number in self._plans[shard].numbers]
            try:
                self._result(shard, self._call(shard, "load", paths))
            except (ExtraBuffersError, OSError) as error:
                logger.warning("Shard %d could not be restored: %s", shard, error)

    def _parts_of(self, shard: int) -> list[RemotePart]:
        return [self.parts[number] for number in self._plans[shard].numbers]

    def _take_states(self, shard: int, states: list[PartState]) -> None:
        for part, state in zip(self._parts_of(shard), states, strict=True):
            part.pos, part.full = state
        # An estimate until the next reply: what a new transition has.
        n = sum(part.size() * part.n_envs for part in self._parts_of(shard))
        self._totals[shard] = n * self._new_priority()

    def refresh(self) -> None:
        """Find out what shards have, for instance after they have loaded files."""
        self._queue.clear()
        for shard, states in enumerate(self.ask_all("states")):
            self._take_states(shard, states)
            self._added[shard].clear()

    def _send_segment(self, number: int, data: Bytes, before: ReceivedSegment | None, n_transitions: int) -> None:
        shard = int(self._homes[number])
        priority = self.max_priority if self._template.is_prioritized else None
        self._send(shard, "ingest", int(self._own_numbers[number]), data, before, priority)
        added = n_transitions * self._new_priority()
        self._totals[shard] += added
        self._added[shard].append((self._n_messages[shard], added))

    def _new_priority(self) -> float:
        return float(self.max_priority**self._template.first.alpha) if self._template.is_prioritized else 1.0

    # Batches

    def sample(self, batch_size: int, env: VecNormalize | None) -> Any:
        if self._queue and self._queue[0][0] != batch_size:
            self._queue.clear()
        self._ask_ahead(batch_size, self._prefetch)
        _, requests = self._queue.popleft()
        pieces = self._replies(requests)
        if self._prefetch > 1:  # so that shards work while this batch is decoded
            self._ask_ahead(batch_size, self._prefetch)
        return self._batch(batch_size, pieces, env)

    def _ask_ahead(self, batch_size: int, n: int) -> None:
        """Request batches until ``n`` of them are on their way."""
        # Two calls for half of the batches each: a call takes longer than most of what it asks for.
        at_once = max(n // 2, 1)
        while len(self._queue) + at_once <= n:
            asked = self._request([np.arange(batch_size)] * at_once)
            self._queue += [(batch_size, requests) for requests in asked]

    def _request(self, batches: list[Indices]) -> list[list[Request]]:
        """Draw transitions for some rows of batches, and ask shards for them."""
        draw = self._by_priority if self._template.is_prioritized else self._uniformly
        drawn = [draw(len(rows)) for rows in batches]
        requests: list[list[Request]] = [[] for _ in batches]
        for shard in sorted({shard for shares in drawn for shard in shares}):
            asked = [(number, shares[shard]) for number, shares in enumerate(drawn) if shard in shares]
            handle = self._call(shard, "draw", [arguments for _, (_, arguments) in asked])
            call = Call(shard, self._lives[shard], handle, self._n_messages[shard])
            for position, (number, (mine, _)) in enumerate(asked):
                total = float(self._totals[shard])
                requests[number].append(Request(call, position, batches[number][mine], total))
        return requests

    def _uniformly(self, n: int) -> dict[int, tuple[Indices, Any]]:
        """For each shard, its rows of a batch, and what it is asked for."""
        numbers, slots, envs = draw_uniformly(self.parts, n)
        homes, shares = self._homes[numbers], {}
        for shard in np.unique(homes).tolist():
            mine = np.flatnonzero(homes == shard)
            shares[shard] = mine, Places(self._own_numbers[numbers[mine]], slots[mine], envs[mine])
        return shares

    def _by_priority(self, n: int) -> dict[int, tuple[Indices, Any]]:
        total = self._totals.sum()
        if total == 0:
            raise EmptyBufferError("The buffer is empty: add transitions before sampling from it.")
        positions = np.arange(n) + np.random.random_sample(n)
        fractions, shares = self._totals / total, {}
        ends = n * fractions.cumsum()
        shards = np.minimum(np.searchsorted(ends, positions, side="right"), np.flatnonzero(fractions)[-1])
        for shard in np.unique(shards).tolist():
            mine = np.flatnonzero(shards == shard)
            # Within the shard. With one shard, these are the same numbers.
            begin = ends[shard - 1] if shard else 0.0
            shares[shard] = mine, ((positions[mine] - begin) / fractions[shard], n)
        return shares

    def _replies(self, requests: list[Request]) -> list[tuple[Request, Drawn]]:
        """Wait for replies. Rows of a shard that died are drawn again, from all that are left."""
        pieces = []
        while requests:
            missing: list[Indices] = []
            for request in requests:
                reply = self._reply(request)
                if reply is None:
                    missing.append(request.rows)
                else:
                    pieces.append((request, reply))
            requests = self._request([np.concatenate(missing)])[0] if missing else []
        return pieces

    def _reply(self, request: Request) -> Drawn | None:
        call, shard = request.call, request.call.shard
        if call.replies is None and call.life == self._lives[shard]:
            call.replies = self._try(shard, call.handle)
        if call.replies is None:
            return None  # it died
        reply = call.replies[request.position]
        if reply is None:  # it has less than was sent to it
            if call.life == self._lives[shard]:
                self.refresh()
            return None
        if call.life != self._lives[shard]:
            return reply
        if reply.n_refused > self._refused[shard]:
            logger.warning("Shard %d could not ingest a segment: %s", shard, reply.refusal)
            self._refused[shard] = reply.n_refused
        added = self._added[shard]
        while added and added[0][0] <= call.message:
            added.popleft()
        self._totals[shard] = reply.total + sum(priorities for _, priorities in added)
        return reply

    def _batch(self, n: int, pieces: list[tuple[Request, Drawn]], env: VecNormalize | None) -> Any:
        outs = self._template.empty_batch(n)
        for key, store in self._template.first._stores.items():
            fill_from([(request.rows, reply.blocks[key]) for request, reply in pieces], store, outs[key])
        fields: list[Any] = [
            None if values[0] is None else self._joined(n, pieces, values)
            for values in zip(*(reply.fields for _, reply in pieces), strict=True)
        ]
        samples = self._template.batch_of(outs, Fields(*fields), env)
        if not self._template.is_prioritized:
            return samples
        values: list[Any] = [reply.priorities for _, reply in pieces]
        if len(self._plans) > 1:
            # The sum that decided how many rows a shard has may have been out of date.
            values = [own * request.total / reply.total for own, (request, reply) in zip(values, pieces, strict=True)]
        priorities = self._joined(n, pieces, values)
        first = self._template.first
        weights = (priorities.min(initial=np.inf) / priorities) ** first.beta
        indices = self._joined(n, pieces, [self._indices(request, reply) for request, reply in pieces])
        weights_tensor = first.to_torch(weights.astype(np.float32).reshape(-1, 1))
        return PrioritizedReplayBufferSamples._make([*samples, weights_tensor, indices])

    @staticmethod
    def _joined(n: int, pieces: list[tuple[Request, Drawn]], values: Any) -> Any:
        joined = np.empty((n, *values[0].shape[1:]), dtype=values[0].dtype)
        for (request, _), value in zip(pieces, values, strict=True):
            joined[request.rows] = value
        return joined

    # Priorities

    def _indices(self, request: Request, reply: Drawn) -> Indices:
        assert reply.indices is not None
        own, places, generations = reply.indices
        numbers = np.array(self._plans[request.call.shard].numbers)[own]
        lives = request.call.life & ((1 << _LIFE_BITS) - 1)
        stamps = (lives << GENERATION_BITS | generations) << _PLACE_BITS
        return stamps | (numbers * self._stride + places)

    @property
    def _stride(self) -> int:
        return int(self.parts[0].buffer_size * self.parts[0].n_envs)

    def update(self, indices: Indices, errors: npt.NDArray[np.float64]) -> None:
        """Send new priorities to the shards, and do not wait."""
        priorities = errors + self._template.first.epsilon
        self.max_priority = max(self.max_priority, float(priorities.max(initial=0.0)))
        numbers, places = np.divmod(indices & ((1 << _PLACE_BITS) - 1), self._stride)
        if len(indices) and not 0 <= numbers.min() <= numbers.max() < len(self.parts):
            raise IndexError(f"There are {len(self.parts)} parts, but indices of part {numbers.max()}.")
        stamps = indices >> _PLACE_BITS
        generations, lives = stamps & ((1 << GENERATION_BITS) - 1), stamps >> GENERATION_BITS
        homes = self._homes[numbers]
        current = lives == np.array(self._lives)[homes] & ((1 << _LIFE_BITS) - 1)
        self.n_late += int((~current).sum())
        for shard in np.unique(homes[current]).tolist():
            mine = current & (homes == shard)
            own = self._own_numbers[numbers[mine]], places[mine], generations[mine]
            self._send(shard, "update", own, priorities[mine], self.max_priority)

    def save(self, paths: list[Path]) -> None:
        """Let all shards write their parts, each to its file. A shard that dies is restored from there."""
        self._ask_each("save", paths)
        self._saved = paths

    def load(self, paths: list[Path], max_priority: float) -> None:
        self._ask_each("load", paths)
        self._saved, self.max_priority = paths, max_priority
        self.refresh()

    def _ask_each(self, method: str, paths: list[Path]) -> None:
        arguments = [[str(paths[number]) for number in plan.numbers] for plan in self._plans]
        handles = [self._call(shard, method, own) for shard, own in enumerate(arguments)]
        for shard, handle in enumerate(handles):
            self._finished(shard, handle, method)

    def reset(self) -> None:
        self.ask_all("reset")
        self.refresh()

    def stop(self) -> None:
        self._queue.clear()
        self._transport.stop()
