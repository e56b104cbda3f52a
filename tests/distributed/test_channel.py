"""Shards in processes of their own, reached through channels: what may go wrong between processes."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.compressed import CompressedPrioritizedReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.distributed import buffer as buffer_module
from sb3_extra_buffers.distributed import channel as channel_module
from sb3_extra_buffers.distributed.channel import Address, Channel, Listener, connect, serve
from sb3_extra_buffers.distributed.shard_transport import ShardDied
from sb3_extra_buffers.errors import CorruptDataError, WorkerError
from tests.distributed.processes import FORK, ProcessShards
from tests.distributed.test_sharded_buffer import IMAGES, N_ENVS, VECTORS, filled, make, steps
from tests.distributed.test_shards import REMOTE, assert_same_batches, transport_of
from tests.transitions import assert_same

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shards write to the learner's memory only on Linux"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # the children use no other thread
]
SIZES = (40, 60, 30)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of this test are processes."""
    monkeypatch.setattr(buffer_module, "LocalShards", ProcessShards)


@pytest.fixture
def peer() -> Iterator[Callable[..., Channel]]:
    """Makes the learner's end of a channel to a process that does something with its end."""
    started: list[Any] = []

    def make_channel(work: Callable[[socket.socket, Address], None]) -> Channel:
        listener, (ours, theirs) = Listener(), FORK.Pipe()

        def run() -> None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            connected = connect(listener.address)
            theirs.send(True)
            assert connected is not None
            work(connected, listener.address)
            os._exit(0)

        process = FORK.Process(target=run, daemon=True)
        process.start()
        theirs.close()
        assert ours.recv()
        channel = listener.accept()
        assert channel is not None
        started.append((process, channel))
        return channel

    yield make_channel
    for process, channel in started:
        channel.close()
        process.kill()
        process.join()


def echo(connected: socket.socket, address: Address) -> None:
    serve(connected, address, lambda message: message)


def known_rows() -> tuple[Any, Any]:
    """The observations and next observations of each transition. Its reward is its number."""
    here = filled(SIZES)
    known = [part._samples_at(*np.divmod(np.arange(part.size() * N_ENVS), N_ENVS), None) for part in here.parts]
    names = "observations", "next_observations"
    observations, following = (np.concatenate([getattr(part, name) for part in known]) for name in names)
    return observations, following


def check_rows(batch: Any, rows: tuple[Any, Any]) -> None:
    numbers = batch.rewards.numpy().reshape(-1).astype(np.int64)
    np.testing.assert_array_equal(batch.observations, rows[0][numbers])
    np.testing.assert_array_equal(batch.next_observations, rows[1][numbers])


# Batches


@pytest.mark.parametrize(
    ("cls", "space", "options"),
    [(CompressedReplayBuffer, IMAGES, {}), (CompressedPrioritizedReplayBuffer, VECTORS, {"alpha": 0.7, "n_steps": 3})],
    ids=str,
)
def test_one_shard_is_the_class_itself(processes: None, cls: Any, space: Any, options: dict[str, Any]) -> None:
    """Whatever was added or updated before a batch is in it: messages are answered in order."""
    single = make(cls, space=space, **options)
    sharded = make(space=space, buffer_class=cls, shards=1, prefetch=1, **REMOTE, **options)
    rng = np.random.default_rng(0)
    assert_same_batches(single, sharded, steps(400, space=space), lambda number: rng.random() < 0.1)
    sharded.check()
    sharded.close()
    sharded.close()
    with pytest.raises(WorkerError, match="closed"):
        sharded.sample(4)


@pytest.mark.parametrize("prefetch", [1, 2, 300])
def test_batches_are_those_of_parts_in_this_process(processes: None, prefetch: int) -> None:
    here, there = filled(SIZES), filled(SIZES, **REMOTE, shards=2, prefetch=prefetch)
    np.random.seed(0)
    expected = [tuple(here.sample(16)) for _ in range(2 * prefetch)]
    np.random.seed(0)
    for batch in expected:
        assert_same(batch, tuple(there.sample(16)))
    there.close()


def test_shards_are_killed_at_random(processes: None, tmp_path: Path) -> None:
    """With requests ahead, and batches that are kept: what an old process has written is in no batch of a new one."""
    rng = np.random.default_rng(0)
    np.random.seed(0)
    rows, kept = known_rows(), []
    buffer = filled(SIZES, **REMOTE, shards=3, prefetch=5)
    buffer.save(tmp_path / "saved")  # which shards are restored from
    for turn in range(70):
        if turn % 12 == 11:
            transport_of(buffer).kill(int(rng.integers(3)))
        kept.append(buffer.sample(int(rng.choice([16, 17]))))
        del kept[: -int(rng.integers(1, 8))]
        for batch in kept:
            check_rows(batch, rows)
    assert sum(buffer._shards._restarts) == 5
    assert buffer.shard_statistics["transitions_lost"] == 0
    buffer.check()
    buffer.close()


def test_a_death_is_seen_at_once(processes: None) -> None:
    buffer = filled(SIZES, **REMOTE, shards=2)
    transport = transport_of(buffer)
    handle = transport.call(0, "states")
    transport.result(handle, 5.0)
    os.kill(transport.processes[0].pid, signal.SIGSTOP)
    handle = transport.call(0, "states")
    with pytest.raises(TimeoutError):
        transport.result(handle, 0.05)
    transport.kill(0)
    began = time.monotonic()
    with pytest.raises(ShardDied):
        transport.result(handle, 60.0)
    later = transport.call(0, "states")  # which only its result says
    with pytest.raises(ShardDied):
        transport.result(later, 60.0)
    assert time.monotonic() - began < 5
    transport.restart(0)
    with pytest.raises(ShardDied):  # not the reply of another process
        transport.result(handle, 60.0)
    assert len(transport.result(transport.call(0, "states"), 5.0)) == 2
    buffer.close()


def test_errors_of_a_shard_are_raised_at_the_learner(processes: None, tmp_path: Path) -> None:
    buffer, other = filled(SIZES, **REMOTE, shards=1), make(CompressedReplayBuffer, size=60)
    other.add(*next(steps(1)))
    other.save(tmp_path / "other")
    transport = transport_of(buffer)
    call = transport.call(0, "load", [str(tmp_path / "other")] * 3)
    with pytest.raises(CorruptDataError, match="another buffer"):
        transport.result(call, 5.0)
    call = transport.call(0, "dance")
    with pytest.raises(WorkerError, match=r"has no attribute 'dance'"):
        transport.result(call, 5.0)
    assert buffer.sample(8).rewards.shape == (8, 1)
    buffer.close()


def test_a_fork_does_not_disturb_the_shards(processes: None) -> None:
    buffer, rows = filled(SIZES, **REMOTE, shards=2), known_rows()
    buffer.sample(16)
    child = os.fork()
    if child == 0:
        try:
            buffer.sample(16)
        except WorkerError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    for _ in range(10):
        check_rows(buffer.sample(16), rows)
    buffer.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C in a __del__
def test_sampling_goes_on_after_ctrl_c(processes: None) -> None:
    """At any moment. Batches are right afterwards, and no reply is taken for another one."""
    buffer, rows = filled(SIZES, **REMOTE, shards=2, prefetch=3), known_rows()
    n_interrupted, is_sampling, ended = 0, False, threading.Event()
    chance = random.Random(0)

    def interrupt() -> None:
        while not ended.wait(chance.uniform(0.0005, 0.01)):
            os.kill(os.getpid(), signal.SIGINT)

    def handle(*_: Any) -> None:
        nonlocal is_sampling
        if is_sampling:
            is_sampling = False
            raise KeyboardInterrupt

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, handle)
    thread.start()
    end = time.monotonic() + 30
    while n_interrupted < 40 and time.monotonic() < end:
        try:
            is_sampling = True
            batch = buffer.sample(16)
            is_sampling = False
        except KeyboardInterrupt:
            n_interrupted += 1
        else:
            check_rows(batch, rows)
    ended.set()
    thread.join()
    signal.signal(signal.SIGINT, before)
    assert n_interrupted >= 40
    for _ in range(10):
        check_rows(buffer.sample(16), rows)
    assert len(buffer._shards.outputs._blocks) <= 3 + 4
    buffer.close()


# The channel itself


def test_a_reply_that_ends_in_the_middle(peer: Any) -> None:
    """Of three messages, the first is answered, the second half, and then the process is killed."""

    def work(connected: socket.socket, address: Address) -> None:
        time.sleep(0.1)
        connected.sendall(struct.pack("<Q", 5) + b"first" + struct.pack("<Q", 1000) + b"second")
        os.kill(os.getpid(), signal.SIGKILL)

    channel = peer(work)
    first, second, third = (channel.send(b"?") for _ in range(3))
    began = time.monotonic()
    with pytest.raises(ShardDied):
        channel.wait(second, 60.0)
    assert channel.wait(first, 60.0) == b"first"
    with pytest.raises(ShardDied):
        channel.wait(third, 60.0)
    with pytest.raises(ShardDied):
        channel.wait(channel.send(b"?"), 60.0)
    assert time.monotonic() - began < 5
    channel.close()
    channel.close()


def test_neither_side_waits_for_the_other_to_read(peer: Any) -> None:
    """More than sockets hold is on the way in both directions."""
    channel = peer(echo)
    messages = [bytes([number]) * (1 << 20) for number in range(40)]
    sent = [channel.send(message) for message in messages]
    for pending, message in reversed(list(zip(sent, messages, strict=True))):
        assert channel.wait(pending, 30.0) == message
    assert not channel._unsent
    assert not channel._received
    assert not channel._waiting


def test_messages_of_any_size_arrive(peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_READ_BYTES", 7)  # so that replies arrive in pieces
    channel = peer(echo)
    messages = [bytes(range(256)) * n for n in (0, 1, 3)] + [b"x", b""]
    for _ in range(3):
        sent = [channel.send(message) for message in messages]
        assert [channel.wait(pending, 30.0) for pending in sent] == messages


def test_replies_that_nobody_waits_for_take_no_memory(peer: Any) -> None:
    channel = peer(echo)
    for _ in range(200):
        channel.send(b"x" * 1000)
    assert channel.wait(channel.send(b"last"), 30.0) == b"last"
    assert not channel._waiting
    assert not channel._received


def test_nobody_else_can_connect() -> None:
    listener = Listener()
    folder = Path(listener.address.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert listener.address.shard_key not in pickle.dumps(listener.address.path)
    silent, wrong, right = (socket.socket(socket.AF_UNIX) for _ in range(3))
    with silent, wrong, right:
        for stranger in (silent, wrong):
            stranger.connect(listener.address.path)
        wrong.send(b"x" * len(listener.address.shard_key))
        right.connect(listener.address.path)
        right.send(listener.address.shard_key)
        channel = listener.accept()
        assert channel is not None
        assert right.recv(100) == listener.address.learner_key
        assert silent.recv(100) == wrong.recv(100) == b""  # closed
        assert not folder.exists()
        channel.close()
    assert connect(listener.address) is None  # as on another machine


def test_nobody_with_a_key_has_connected() -> None:
    listener = Listener()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(listener.address.path)
        assert listener.accept() is None
    assert listener.accept() is None


def test_a_shard_does_not_answer_a_learner_without_the_key() -> None:
    """Messages are pickles: nothing of a stranger is unpickled."""
    ours, theirs = socket.socketpair()
    seen: list[bytes] = []

    def answer(message: bytes) -> bytes:
        seen.append(message)
        return b""

    address = Address("", b"", b"k" * 32)
    thread = threading.Thread(target=serve, args=(theirs, address, answer))
    thread.start()
    ours.sendall(b"x" * 32 + struct.pack("<Q", 3) + b"abc")
    thread.join(10)
    assert not thread.is_alive()
    assert seen == []
    ours.close()


def test_a_path_that_is_too_long_for_a_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    monkeypatch.setattr(channel_module.tempfile, "mkdtemp", lambda prefix: str(folder))
    listener = Listener()
    assert connect(listener.address) is None
    assert listener.accept() is None
    assert not folder.exists()
