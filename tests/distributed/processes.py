"""Shards in processes of their own, reached through channels, without Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
from functools import partial
from typing import Any

import torch as th

from sb3_extra_buffers.distributed.channel import Address, Channel, Listener, Pending, connect, serve
from sb3_extra_buffers.distributed.shard import Shard, ShardPlan
from sb3_extra_buffers.distributed.shard_transport import ShardTransport, answer_call, pack_call, result_of

FORK = multiprocessing.get_context("fork")


def run_shard(plan: ShardPlan, address: Address, ready: Any) -> None:
    th.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    shard, connected = Shard(plan), connect(address)
    assert connected is not None
    ready.send(True)
    serve(connected, address, partial(answer_call, shard))
    os._exit(0)


class ProcessShards(ShardTransport):
    """As Ray's shards on this machine, but processes are forked."""

    def start(self, plans: list[ShardPlan]) -> None:
        self._plans = plans
        self.processes: list[Any] = [None] * len(plans)
        self.channels: list[Any] = [None] * len(plans)
        for shard in range(len(plans)):
            self._start(shard)

    def _start(self, shard: int) -> None:
        listener, (ours, theirs) = Listener(), FORK.Pipe()
        arguments = self._plans[shard], listener.address, theirs
        self.processes[shard] = FORK.Process(target=run_shard, args=arguments, daemon=True)
        self.processes[shard].start()
        theirs.close()
        assert ours.recv()
        ours.close()
        self.channels[shard] = listener.accept()

    def call(self, shard: int, method: str, *arguments: Any) -> tuple[Channel, Pending]:
        channel = self.channels[shard]
        return channel, channel.send(pack_call(method, arguments))

    def result(self, handle: tuple[Channel, Pending], timeout: float) -> Any:
        channel, pending = handle
        return result_of(channel.wait(pending, timeout))

    def kill(self, shard: int) -> None:
        self.processes[shard].kill()

    def restart(self, shard: int) -> None:
        self._end(shard)
        self._start(shard)

    def _end(self, shard: int) -> None:
        self.channels[shard].close()
        self.kill(shard)
        self.processes[shard].join()
        self.processes[shard].close()

    def stop(self) -> None:
        for shard in range(len(self.processes)):
            self._end(shard)
        self.processes, self.channels = [], []
