"""Memory of sampled batches is used again, but never while anybody can still see it."""

from __future__ import annotations

import ctypes
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.storage.outputs import OutputPool

SPACE = spaces.Box(0, 255, (4, 32, 32), np.uint8)
BATCH = 32
CPU = th.device("cpu")


@pytest.fixture(scope="module")
def buffer() -> CompressedReplayBuffer:
    buffer = CompressedReplayBuffer(64, SPACE, spaces.Discrete(2), device="cpu", compression_method="none")
    rng = np.random.default_rng(0)
    for _ in range(64):
        pair = rng.integers(0, 256, (2, 1, *SPACE.shape), dtype=np.uint8)
        buffer.add(*pair, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
    return buffer


def as_bytes(thing: Any) -> bytes:
    if isinstance(thing, th.Tensor):
        return thing.detach().clone().numpy().tobytes()
    if isinstance(thing, th.UntypedStorage):
        return bytes(thing.tolist())
    return bytes(np.array(thing).tobytes())


class Subclass(np.ndarray):
    pass


class WithInterface:
    """Describes an array's memory to NumPy."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


ARRAY_VIEWS: dict[str, Callable[[np.ndarray], Any]] = {
    "the array": lambda a: a,
    "a slice": lambda a: a[3:5, :, ::2],
    "a slice of a slice": lambda a: a[3:][1:][:2],
    "one element as an array": lambda a: a[5, 1, 1, 1:2],
    "a transposed view": lambda a: a.transpose(0, 2, 3, 1),
    "another shape": lambda a: a.reshape(-1)[100:200],
    "another dtype": lambda a: a.view(np.uint32),
    "a subclass": lambda a: a.view(Subclass)[2:],
    "a memoryview": memoryview,
    "its data": lambda a: a.data[2:3],
    "a flat iterator's base": lambda a: a.flat.base,
    "frombuffer": lambda a: np.frombuffer(a.reshape(-1), dtype=np.uint8)[7:],
    "a view with strides": lambda a: np.lib.stride_tricks.as_strided(a, (4, 4), (1, 2)),
    "an array interface": lambda a: np.asarray(WithInterface(a)),
    "a ctypes pointer": lambda a: a.ctypes.data_as(ctypes.POINTER(ctypes.c_ubyte * a.nbytes)),
    "its base": lambda a: a.base,
    "a tensor of it": lambda a: th.as_tensor(a)[1:],
    "DLPack of NumPy": lambda a: th.from_dlpack(a),
    "a tensor from its buffer": lambda a: th.frombuffer(a.reshape(-1), dtype=th.uint8)[9:],
    "in an array of objects": lambda a: np.array([a[1], None], dtype=object),
}
TENSOR_VIEWS: dict[str, Callable[[th.Tensor], Any]] = {
    "the tensor": lambda t: t,
    "a slice": lambda t: t[2:4],
    "one element": lambda t: t[2, 1, 3, 4],
    "a transposed view": lambda t: t.permute(0, 2, 3, 1),
    "another shape": lambda t: t.view(-1)[50:],
    "another dtype": lambda t: t.view(th.int16),
    "detached": lambda t: t.detach()[1:],
    "its data": lambda t: t.data[1:],
    "its array": lambda t: t.numpy(),
    "a slice of its array": lambda t: t.numpy()[4:6][:, 1],
    "its storage": lambda t: t.untyped_storage(),
    "its typed storage's tensor": lambda t: th.tensor([], dtype=th.uint8).set_(t.untyped_storage()),
    "DLPack to NumPy": lambda t: np.from_dlpack(t)[1:],
    "DLPack to torch": lambda t: th.from_dlpack(t)[1:],
    "unbound": lambda t: t.unbind()[7],
    "split": lambda t: t.split(5)[1],
    "strided": lambda t: t.as_strided((3, 5), (7, 2)),
    "a memoryview of its array": lambda t: memoryview(t.numpy()),
    "a parameter": lambda t: th.nn.Parameter(t, requires_grad=False),
}


def holds(buffer: CompressedReplayBuffer, take: Callable[[], Any], read: Callable[[Any], bytes], times: int) -> None:
    kept = take()
    before = read(kept)
    gc.collect()
    for _ in range(times):
        buffer.sample(BATCH)
        buffer.observations[np.arange(BATCH), np.zeros(BATCH, np.int64)]
    assert read(kept) == before


@pytest.mark.parametrize("name", ARRAY_VIEWS)
def test_what_is_kept_of_an_array_never_changes(name: str, buffer: CompressedReplayBuffer) -> None:
    def take() -> Any:
        return ARRAY_VIEWS[name](buffer.observations[np.arange(BATCH), np.zeros(BATCH, np.int64)])

    read = (lambda p: bytes(p.contents)) if "ctypes" in name else as_bytes
    if "objects" in name:
        read = lambda kept: kept[0].tobytes()  # noqa: E731
    holds(buffer, take, read, 1000)


@pytest.mark.parametrize("name", TENSOR_VIEWS)
def test_what_is_kept_of_a_tensor_never_changes(name: str, buffer: CompressedReplayBuffer) -> None:
    holds(buffer, lambda: TENSOR_VIEWS[name](buffer.sample(BATCH).observations), as_bytes, 1000)


def test_a_dlpack_capsule_keeps_its_memory(buffer: CompressedReplayBuffer) -> None:
    tensor = buffer.sample(BATCH).observations
    before, capsule = as_bytes(tensor), th.utils.dlpack.to_dlpack(tensor)
    del tensor
    for _ in range(1000):
        buffer.sample(BATCH)
    assert as_bytes(th.from_dlpack(capsule)) == before


def test_a_graph_of_autograd_keeps_its_memory() -> None:
    space = spaces.Box(-1, 1, (64, 32), np.float32)
    vectors = CompressedReplayBuffer(64, space, spaces.Discrete(2), device="cpu", compression_method="none")
    rng = np.random.default_rng(0)
    for _ in range(64):
        pair = rng.random((2, 1, *space.shape), dtype=np.float32)
        vectors.add(*pair, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
    weight = th.ones(space.shape, requires_grad=True)
    batch = vectors.sample(BATCH).observations
    expected = batch.sum(0).clone()
    loss = (batch * weight).sum()
    del batch
    for _ in range(1000):
        vectors.sample(BATCH)
    loss.backward()
    assert weight.grad is not None
    assert th.equal(weight.grad, expected)


class Keeper:
    """Part of a cycle, and looks at its batch when it is collected."""

    seen: list[bytes]
    rescued: list[Any]

    def __init__(self, batch: th.Tensor, seen: list[bytes], rescued: list[Any]) -> None:
        self.batch, self.seen, self.rescued, self.me = batch, seen, rescued, self

    def __del__(self) -> None:
        self.seen.append(as_bytes(self.batch))
        self.rescued.append(self.batch[1:])


def test_a_batch_in_a_cycle_stays_until_the_cycle_is_collected(buffer: CompressedReplayBuffer) -> None:
    seen: list[bytes] = []
    rescued: list[Any] = []
    gc.disable()
    try:
        keeper = Keeper(buffer.sample(BATCH).observations, seen, rescued)
        before = as_bytes(keeper.batch)
        del keeper
        for _ in range(100):
            buffer.sample(BATCH)
        gc.collect()
    finally:
        gc.enable()
    assert seen == [before]
    for _ in range(1000):  # what the finalizer rescued is as good as anything else that is kept
        buffer.sample(BATCH)
    assert as_bytes(rescued[0]) == before[len(before) // BATCH :]


def test_shared_memory_and_pickles_are_copies(buffer: CompressedReplayBuffer) -> None:
    tensor = buffer.sample(BATCH).observations
    before, copy = as_bytes(tensor), pickle.loads(pickle.dumps(tensor))
    tensor.share_memory_()
    for _ in range(1000):
        buffer.sample(BATCH)
    assert as_bytes(tensor) == as_bytes(copy) == before


def test_threads_never_get_the_same_memory(buffer: CompressedReplayBuffer) -> None:
    problems: list[str] = []

    def work() -> None:
        kept: list[tuple[th.Tensor, bytes]] = []
        for _ in range(200):
            tensor = buffer.sample(BATCH).observations
            kept = [*kept[-3:], (tensor, as_bytes(tensor))]
            if any(as_bytes(old) != before for old, before in kept):
                problems.append("a batch has changed")
                return

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_memory_is_used_again() -> None:
    pool = OutputPool()
    addresses = set()
    for _ in range(100):
        arrays = [pool.take((BATCH, 4096), np.dtype(np.uint8), CPU) for _ in range(2)]
        addresses |= {array.ctypes.data for array in arrays}
        del arrays
    assert len(addresses) == 2


def test_large_arrays_are_aligned_so_that_other_libraries_can_use_their_memory() -> None:
    pool = OutputPool()
    kept = [pool.take((1 << 16, n), np.dtype(np.uint8), CPU) for n in range(1, 20)]
    assert {array.ctypes.data % 64 for array in kept} == {0}


def test_memory_that_is_kept_is_replaced_by_other_memory() -> None:
    pool = OutputPool()
    kept = [pool.take((BATCH, 4096), np.dtype(np.uint8), CPU)[1:] for _ in range(10)]
    assert len({array.ctypes.data for array in kept}) == 10
    assert pool.nbytes <= 4 * BATCH * 4096


def test_only_its_own_arrays_become_tensors_without_a_copy() -> None:
    pool = OutputPool()
    for size in (10, 1 << 17):
        array = pool.take((size,), np.dtype(np.uint8), CPU)
        tensor = pool.to_tensor(array, CPU)
        assert tensor is not None
        assert tensor.data_ptr() == array.ctypes.data
    assert pool.to_tensor(np.zeros(4), CPU) is None
    assert pool.to_tensor(np.zeros(8)[2:], CPU) is None


def test_a_loop_that_holds_the_previous_batch_gets_no_fresh_memory(buffer: CompressedReplayBuffer) -> None:
    batch, seen = buffer.sample(BATCH), set()
    for step in range(12):
        batch = buffer.sample(BATCH)  # the previous batch goes only after this one was made
        if step >= 2:
            seen |= {batch.observations.data_ptr(), batch.next_observations.data_ptr()}
    assert len(seen) == 4
