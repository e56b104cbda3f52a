"""Collectors and shards as Ray actors, on this machine or on a cluster."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch as th

from sb3_extra_buffers.distributed.channel import IS_AVAILABLE, Address, Channel, Listener, connect, serve
from sb3_extra_buffers.distributed.collector import Collector, CollectorPlan, Request, Weights
from sb3_extra_buffers.distributed.shard import Shard, ShardPlan
from sb3_extra_buffers.distributed.shard_transport import ShardDied, ShardTransport, answer_call, pack_call, result_of
from sb3_extra_buffers.distributed.transport import Reply, Transport
from sb3_extra_buffers.errors import ConfigurationError, MissingPackageError, WorkerError
from sb3_extra_buffers.interruption import uninterrupted

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError
except ImportError as error:
    raise MissingPackageError("Running collectors or shards in other processes", "ray", "ray") from error

_CONNECT_SECONDS = 8.0
"""How long to wait for an answer from the address of a cluster."""


class RayTransport(Transport):
    """Collectors as actors. Segments stay in Ray's object store until the learner fetches them.

    :param options: Arguments of ``ray.init``. Without an ``address``, Ray is started on this machine.
    :param actor_options: Arguments of ``ray.remote`` for collectors, such as ``num_cpus``.
    """

    def __init__(self, options: Mapping[str, Any] | None, actor_options: Mapping[str, Any] | None) -> None:
        self._options = dict(options or {})
        self._actor_options = dict(actor_options or {})
        self._actors: list[Any] = []
        self._waiting: dict[Any, int] = {}
        """Calls without a reply, with their collectors."""

    def start(self, plan: CollectorPlan, seeds: list[int | None]) -> None:
        _connect(self._options)
        if "num_cpus" not in self._actor_options:
            # On this machine, Ray would wait forever for CPUs that do not exist, whereas a cluster may still grow.
            is_local = self._options.get("address") in (None, "local")
            share = ray.cluster_resources().get("CPU", 1.0) / len(seeds)  # type: ignore[no-untyped-call]
            self._actor_options["num_cpus"] = min(1.0, math.floor(1000 * share) / 1000) if is_local else 1.0
        self._plan = ray.put(plan)  # pickled only once
        self._actors = [self._make(index, seed) for index, seed in enumerate(seeds)]

    def _make(self, index: int, seed: int | None) -> Any:
        return ray.remote(**self._actor_options)(Collector).remote(self._plan, index, seed)

    def publish(self, weights: Weights) -> Any:
        return ray.put(weights)

    def submit(self, collector: int, request: Request, weights: Any) -> None:
        call = self._actors[collector].collect.remote(request, weights)
        self._waiting[call] = collector

    def replies(self, timeout: float) -> list[Reply]:
        if not self._waiting:
            return []
        calls = list(self._waiting)
        ray.wait(calls, num_returns=1, timeout=timeout)
        # Fetch all replies that are ready: segments of a collector must be handled before its death.
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        replies = [self._reply(call) for call in ready]
        # All calls of a dead collector fail, but it must be replaced only once.
        dead = {reply.collector: reply for reply in replies if reply.segment is None}
        return [reply for reply in replies if reply.segment is not None] + list(dead.values())

    def _reply(self, call: Any) -> Reply:
        collector = self._waiting.pop(call)
        try:
            return Reply(collector, ray.get(call))
        except RayTaskError as error:
            raise WorkerError(f"Collector {collector} raised an error: {error}") from error
        except RayError as error:  # the process or its node died, or the segment was lost
            return Reply(collector, None, str(error).partition("\n")[0])

    def restart(self, collector: int, seed: int | None) -> None:
        self._waiting = {call: number for call, number in self._waiting.items() if number != collector}
        ray.kill(self._actors[collector])
        self._actors[collector] = self._make(collector, seed)

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._waiting = [], {}


class RayShards(ShardTransport):
    """Shards as actors.

    :param options: Arguments of ``ray.init``. Without an ``address``, Ray is started on this machine.
    :param actor_options: Arguments of ``ray.remote`` for shards. By default, they are spread over all nodes and reserve
        no CPUs, so that all CPUs are left for collectors.
    """

    def __init__(self, options: Mapping[str, Any] | None, actor_options: Mapping[str, Any] | None) -> None:
        self._options = dict(options or {})
        self._actor_options = {"num_cpus": 0, "scheduling_strategy": "SPREAD", **(actor_options or {})}
        self._plans: list[ShardPlan] = []
        self._actors: list[Any] = []
        self._links: list[_Link] = []

    def start(self, plans: list[ShardPlan]) -> None:
        # Ray's processes have a very low priority by default (niceness 15). torch's threads, which wait in a busy loop,
        # would leave little CPU time for them.
        _connect(self._options, niceness=0)
        self._plans, self._process = plans, os.getpid()
        self._actors = [self._make(plan) for plan in plans]
        self._links = [_Link(actor) for actor in self._actors]

    def _make(self, plan: ShardPlan) -> Any:
        return ray.remote(**self._actor_options)(_ShardActor).remote(plan)

    def call(self, shard: int, method: str, *arguments: Any) -> _Sent:
        return self._links[shard].send(pack_call(method, arguments))

    def result(self, handle: _Sent, timeout: float) -> Any:
        try:
            return result_of(handle.link.reply(handle, timeout))
        except GetTimeoutError as error:
            raise TimeoutError(str(error)) from error
        except RayError as error:  # the process or its node died, or the reply was lost
            raise ShardDied(str(error).partition("\n")[0]) from error

    def restart(self, shard: int) -> None:
        self._links[shard].close()
        ray.kill(self._actors[shard])
        self._actors[shard] = self._make(self._plans[shard])
        self._links[shard] = _Link(self._actors[shard])

    def stop(self) -> None:
        if self._actors and os.getpid() != self._process:
            return  # this process is a fork: the shards belong to its parent
        for link in self._links:
            link.close()
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
        self._actors, self._links = [], []


class _Sent:
    """A call. ``handle`` identifies its reply, once the call is sent."""

    def __init__(self, link: _Link, message: bytes) -> None:
        self.link, self.message = link, message
        self.handle: Any = None


class _Link:
    """Sends calls to a shard: through a channel if it is on this machine, otherwise through Ray.

    Calls wait here until the shard has connected to the channel or reported that it cannot. So all of them go the same
    way, and the shard receives them in order.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._listener: Listener | None = None
        if IS_AVAILABLE:
            with suppress(OSError):  # the disk is full, or too many files are open
                self._listener = Listener()
        self._has_connected = actor.connect.remote(None if self._listener is None else self._listener.address)
        self._is_known = False
        """Whether it is decided which way calls go: through the channel or through Ray."""
        self._channel: Channel | None = None
        self._waiting: list[_Sent] = []

    def send(self, message: bytes) -> _Sent:
        sent = _Sent(self, message)
        with uninterrupted():
            self._waiting.append(sent)
            if self._is_known:
                self._send_waiting()
        return sent

    def reply(self, sent: _Sent, timeout: float) -> bytes:
        if not self._is_known:
            has_connected = ray.get(self._has_connected, timeout=timeout)
            with uninterrupted():
                if self._listener is not None and has_connected:
                    self._channel = self._listener.accept()
                elif self._listener is not None:
                    self._listener.close()
                self._is_known = True
                self._send_waiting()
        if self._channel is not None:
            return self._channel.wait(sent.handle, timeout)
        reply: bytes = ray.get(sent.handle, timeout=timeout)
        return reply

    def _send_waiting(self) -> None:
        # Messages are bytes, because Ray takes several times longer for arrays.
        send = self._actor.call.remote if self._channel is None else self._channel.send
        for sent in self._waiting:
            sent.handle = send(sent.message)
        self._waiting.clear()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._listener is not None:
            self._listener.close()


class _ShardActor:
    """A shard in its own process."""

    def __init__(self, plan: ShardPlan) -> None:
        th.set_num_threads(1)  # a machine may have many shards, which all work at the same time
        self._shard = Shard(plan)

    def connect(self, address: Address | None) -> bool:
        """Connect to the learner's channel and serve it. Returns whether that is possible."""
        connected = None if address is None else connect(address)
        if connected is None:
            return False
        arguments = connected, address, partial(answer_call, self._shard)
        threading.Thread(target=serve, args=arguments, daemon=True).start()
        return True

    def call(self, message: bytes) -> bytes:
        return answer_call(self._shard, message)


def _connect(options: Mapping[str, Any], niceness: int | None = None) -> None:
    """Connect to the cluster at ``options["address"]``, or start Ray on this machine, unless that was done before.

    :param niceness: The niceness of Ray's processes, if it starts them on this machine.
    """
    if ray.is_initialized():
        return
    address = options.get("address")
    given = {"log_to_driver": False, "logging_level": "warning", **options}
    if address in (None, "local"):
        # Without "local", Ray would connect to any cluster that it finds on this machine.
        given |= {"address": "local", "include_dashboard": False}
        if niceness is not None:
            given["_system_config"] = {"worker_niceness": niceness, **options.get("_system_config", {})}
    try:
        # Check that somebody answers at the address, because ray.init would try for minutes.
        host, _, port = str(address).rpartition("://")[2].rpartition(":")
        if host and port.isdigit():
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        ray.init(**given)
    except (OSError, RuntimeError, ValueError) as error:
        where = "on this machine" if address is None else f"at address {address!r}"
        raise ConfigurationError(
            f"Cannot start Ray or connect to it {where}: {error}. If the cluster requires a token, set the environment "
            "variables RAY_AUTH_MODE=token and RAY_AUTH_TOKEN=<the token>."
        ) from error
