"""Memory that another process of this machine writes to."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import torch as th

from sb3_extra_buffers.storage import shared_memory
from sb3_extra_buffers.storage.outputs import OutputPool
from sb3_extra_buffers.storage.shared_memory import SharedMemory, attach

pytestmark = pytest.mark.skipif(not shared_memory.IS_AVAILABLE, reason="needs Linux")
CPU = th.device("cpu")


def n_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_another_process_writes_to_it() -> None:
    memory = SharedMemory(10_000)
    program = (
        "from sb3_extra_buffers.storage.shared_memory import Address, attach\n"
        f"attach(Address(*{tuple(memory.address)!r}))[:] = 7\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    assert (memory.bytes == 7).all()


def test_it_stays_when_it_was_closed_but_nobody_finds_it() -> None:
    before = n_files()
    memory = SharedMemory(10_000)
    attached = attach(memory.address)
    assert attached is not None
    assert n_files() == before + 1
    memory.close()
    memory.close()
    assert n_files() == before
    assert attach(memory.address) is None
    attached[:] = 3
    assert (memory.bytes == 3).all()


def test_another_file_with_the_same_number_is_not_written_to() -> None:
    with tempfile.TemporaryFile() as file:
        memory = SharedMemory(10)
        os.dup2(file.fileno(), memory._file)
        assert attach(memory.address) is None
        assert file.read() == b""
    other = SharedMemory(10)
    assert attach(other.address._replace(name=memory.address.name)) is None
    assert attach(other.address._replace(path="/proc/0/fd/0")) is None


def test_memory_that_others_may_still_write_to_is_not_lent_again() -> None:
    pool, before = OutputPool(4, shared=True), n_files()
    lease = pool.lend(100, CPU)
    address = lease.share()
    del lease
    second = pool.lend(100, CPU)
    assert second.share() != address
    second.release()
    expected = second.ctypes.data
    del second
    assert pool.lend(100, CPU).ctypes.data == expected
    for _ in range(20):
        pool.lend(100, CPU).share()  # and forgotten
    assert n_files() <= before + 4
    assert pool.nbytes == 400


def test_files_of_batches_that_are_kept_are_closed() -> None:
    pool, before = OutputPool(4, shared=True), n_files()
    kept = [np.ndarray((50,), np.uint8, pool.lend(100, CPU)) for _ in range(50)]
    for number, array in enumerate(kept):
        array[:] = number
    assert [int(array[0]) for array in kept] == list(range(50))
    assert n_files() <= before + 4


def test_a_child_has_the_batches_of_its_parent() -> None:
    """A fork copies other memory. The child would see what is written to shared memory afterwards."""
    pool = OutputPool(4, shared=True)
    batch = pool.lend(100, CPU)
    batch[:] = 1
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reads, 1)
        os._exit(int(batch[0]))
    del batch
    pool.lend(100, CPU)[:] = 2
    os.write(writes, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
