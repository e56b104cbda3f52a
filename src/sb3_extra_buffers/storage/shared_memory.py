"""Memory that other processes of this machine can write to.

It is an anonymous file (``memfd_create``), which Linux frees when no process uses it any more, even if they crash.
Others open it through ``/proc`` and compare its random name: on another machine, that path may be another file.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import NamedTuple

import torch as th

from sb3_extra_buffers.codecs.base import Bytes

IS_AVAILABLE = hasattr(os, "memfd_create")
_PREFIX = "sb3-extra-buffers-"


class Address(NamedTuple):
    """Where a process finds shared memory of another one."""

    path: str
    name: str
    size: int


class SharedMemory:
    """Memory of this process. Others can attach it until it is closed. It can still be used after that."""

    _file = -1

    def __init__(self, size: int) -> None:
        name = f"{_PREFIX}{uuid.uuid4().hex}"
        self._file = os.memfd_create(name)
        os.ftruncate(self._file, size)
        self.address = Address(f"/proc/{os.getpid()}/fd/{self._file}", name, size)
        self.bytes = _mapped(self._file, size)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    __del__ = close


def attach(address: Address) -> Bytes | None:
    """The same memory in this process; ``None`` if it is on another machine, or was closed."""
    try:
        file = os.open(address.path, os.O_RDWR)
    except OSError:
        return None
    try:
        # The descriptor may have been closed and reused for another file.
        if not str(Path(f"/proc/self/fd/{file}").readlink()).startswith(f"/memfd:{address.name}"):
            return None
        return _mapped(file, address.size)
    finally:
        os.close(file)


def _mapped(file: int, size: int) -> Bytes:
    # Not Python's mmap, which keeps a file open for as long as the memory is used.
    mapped: Bytes = th.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=th.uint8).numpy()
    return mapped
