"""A direct connection of the learner and a shard on its machine, because a call of Ray takes as long as a batch.

It is a Unix socket. The learner listens in a folder that only its user can open, and tells the shard the address and
two random keys through Ray. The shard connects and sends the first key. The learner answers with the second one, so
each knows the other. On another machine there is no such folder, so the shard cannot connect.

A message is its length and its bytes. A shard answers messages one after the other.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import shutil
import socket
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sb3_extra_buffers.distributed.shard_transport import ShardDied
from sb3_extra_buffers.errors import WorkerError
from sb3_extra_buffers.interruption import uninterrupted

IS_AVAILABLE = hasattr(socket, "AF_UNIX") and hasattr(select, "poll")
_LENGTH = struct.Struct("<Q")
_KEY_BYTES = 32
_READ_BYTES = 1 << 18
_CONNECT_SECONDS = 2.0
"""A shard connects at once, unless others have filled the queue of the learner's socket."""


class Address(NamedTuple):
    """What a shard needs to connect."""

    path: str
    shard_key: bytes
    learner_key: bytes


class Listener:
    """Where one shard can connect to this process."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="sb3-extra-buffers-")
        self._socket = socket.socket(socket.AF_UNIX)
        keys = secrets.token_bytes(_KEY_BYTES), secrets.token_bytes(_KEY_BYTES)
        self.address = Address(str(Path(self._folder) / "shard"), *keys)
        try:
            self._socket.bind(self.address.path)
            self._socket.listen()
            self._socket.setblocking(False)
        except OSError:  # the name of the folder may be too long
            self.close()

    def accept(self) -> Channel | None:
        """The connection of a shard that says it has connected. Others, which do not have the key, are closed."""
        try:
            while True:
                connected, _ = self._socket.accept()
                with suppress(OSError):
                    connected.setblocking(False)
                    if hmac.compare_digest(connected.recv(_KEY_BYTES), self.address.shard_key):
                        connected.send(self.address.learner_key)
                        return Channel(connected)
                connected.close()
        except OSError:  # nobody else has connected
            return None
        finally:
            self.close()

    def close(self) -> None:
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def connect(address: Address) -> socket.socket | None:
    """Connect to a learner on this machine; ``None`` if it is on another one."""
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(_CONNECT_SECONDS)
        connected.connect(address.path)
        connected.sendall(address.shard_key)
    except OSError:
        connected.close()
        return None
    connected.settimeout(None)
    return connected


def serve(connected: socket.socket, address: Address, answer: Callable[[bytes], bytes]) -> None:
    """Answer messages of the learner until it closes the connection."""
    with suppress(ConnectionError), connected, connected.makefile("rb") as stream:
        if not hmac.compare_digest(stream.read(_KEY_BYTES), address.learner_key):
            return
        while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
            (n,) = _LENGTH.unpack(head)
            message = stream.read(n)
            if len(message) < n:  # the learner died
                return
            reply = answer(message)
            connected.sendall(_LENGTH.pack(len(reply)) + reply)


class Pending:
    """A message, and its reply once that has arrived."""

    __slots__ = ("reply",)

    def __init__(self) -> None:
        self.reply: bytes | None = None


class Channel:
    """The learner's end.

    Sending never waits until the shard reads, because the shard may wait until the learner reads. What the shard has no
    room for is sent later, together with other messages, or while the learner waits for a reply.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._process = connected, os.getpid()
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._waiting: deque[Pending] = deque()
        """Messages without a reply, in the order in which shards answer."""
        self._unsent, self._received = bytearray(), bytearray()
        self._is_open = True

    def send(self, message: bytes) -> Pending:
        self._check_process()
        pending = Pending()
        if not self._is_open:
            return pending
        with uninterrupted():  # half a message must not be lost
            self._waiting.append(pending)
            self._unsent += _LENGTH.pack(len(message))
            self._unsent += message
            self._write()
        return pending

    def wait(self, pending: Pending, timeout: float) -> bytes:
        """The reply to a message.

        :raises ShardDied: if the shard has closed the connection before it could answer.
        :raises TimeoutError: if it has not answered in time.
        """
        self._check_process()
        end = time.monotonic() + timeout
        while pending.reply is None:
            if not self._is_open:
                raise ShardDied("its process has ended")
            if not self._poll.poll(max(1e3 * (end - time.monotonic()), 0)):
                raise TimeoutError
            with uninterrupted():
                self._write()
                self._read()
        return pending.reply

    def _write(self) -> None:
        """Send what the shard has room for."""
        if not self._unsent:
            return
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it died, but may have sent replies before
            self._unsent.clear()
        # Also wait until there is room, if that was not all.
        self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))

    def _read(self) -> None:
        """Take replies that have arrived."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        received, begin = self._received, 0
        received += data
        while len(received) >= begin + _LENGTH.size:
            end = begin + _LENGTH.size + _LENGTH.unpack_from(received, begin)[0]
            if len(received) < end:
                break
            self._waiting.popleft().reply = bytes(received[begin + _LENGTH.size : end])
            begin = end
        del received[:begin]

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise WorkerError("Shards answer only the process that has made the buffer, not one forked from it.")

    def close(self) -> None:
        self._is_open = False
        self._unsent.clear()
        self._waiting.clear()
        self._socket.close()
