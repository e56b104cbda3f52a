"""A Unix socket between the learner and a shard on the same machine.

It saves time: a call through Ray takes about as long as the shard needs for a batch.

The learner listens in a folder that only its user can open, and sends the shard the address and two random keys through
Ray. The shard connects and sends the first key, and the learner answers with the second one, which authenticates both.
A shard on another machine does not have that folder, so it cannot connect.

A message is sent as its length, followed by its bytes. A shard answers messages in order.
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
"""The largest number of bytes to receive at once."""
_CONNECT_SECONDS = 2.0
"""The timeout of a shard that connects. Connecting only takes long if the queue of the learner's socket is full."""


class Address(NamedTuple):
    """Everything that a shard needs to connect."""

    path: str
    shard_key: bytes
    learner_key: bytes


class Listener:
    """A socket in the learner's process to which one shard can connect."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="sb3-extra-buffers-")
        self._socket = socket.socket(socket.AF_UNIX)
        keys = secrets.token_bytes(_KEY_BYTES), secrets.token_bytes(_KEY_BYTES)
        self.address = Address(str(Path(self._folder) / "shard"), *keys)
        try:
            self._socket.bind(self.address.path)
            self._socket.listen()
            self._socket.setblocking(False)
        except OSError:  # the path may be too long for a socket
            self.close()

    def accept(self) -> Channel | None:
        """Return the shard's connection, or ``None`` if it has not connected. Closes all others, and the listener."""
        try:
            while True:
                connected, _ = self._socket.accept()
                with suppress(OSError):
                    connected.setblocking(False)
                    if hmac.compare_digest(connected.recv(_KEY_BYTES), self.address.shard_key):
                        connected.send(self.address.learner_key)
                        return Channel(connected)
                connected.close()
        except OSError:  # no further connection is waiting
            return None
        finally:
            self.close()

    def close(self) -> None:
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def connect(address: Address) -> socket.socket | None:
    """Connect to a learner on this machine; ``None`` if it is on another machine."""
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
    """Answer the learner's messages until it closes the connection."""
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
    """A message that was sent. ``reply`` is ``None`` until the shard has answered."""

    __slots__ = ("reply",)

    def __init__(self) -> None:
        self.reply: bytes | None = None


class Channel:
    """The learner's end of a connection.

    ``send`` never blocks: otherwise, the learner and the shard could wait forever for each other to read. Bytes that
    the socket does not accept are sent with the next message, or while the learner waits for a reply.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._process = connected, os.getpid()
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._waiting: deque[Pending] = deque()
        """Messages without a reply, oldest first."""
        self._unsent, self._received = bytearray(), bytearray()
        self._is_open = True

    def send(self, message: bytes) -> Pending:
        self._check_process()
        pending = Pending()
        if not self._is_open:
            return pending
        with uninterrupted():  # Ctrl-C must not cut a message in two
            self._waiting.append(pending)
            self._unsent += _LENGTH.pack(len(message))
            self._unsent += message
            self._write()
        return pending

    def wait(self, pending: Pending, timeout: float) -> bytes:
        """Wait for the reply to a message.

        :raises ShardDied: if the shard closed the connection before it answered.
        :raises TimeoutError: if it has not answered after ``timeout`` seconds.
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
        """Send as many bytes as the socket accepts."""
        if not self._unsent:
            return
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the shard died, but replies that it sent before may still arrive
            self._unsent.clear()
        # If bytes are left, poll() also has to return when the socket accepts more.
        self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))

    def _read(self) -> None:
        """Receive bytes that have arrived, and hand complete replies to their messages."""
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
            raise WorkerError("Only the process that created the buffer can use its shards, not a forked process.")

    def close(self) -> None:
        self._is_open = False
        self._unsent.clear()
        self._waiting.clear()
        self._socket.close()
