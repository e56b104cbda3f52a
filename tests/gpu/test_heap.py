"""Packed bytes on a device: neighbours survive whatever happens to a cell, and a limit is a limit."""

from __future__ import annotations

import gc
import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_extra_buffers.compatibility.device import RawBuffer, SharedRawHeap
from sb3_extra_buffers.errors import CapacityError, ExtraBuffersError
from sb3_extra_buffers.gpu_buffers import arena as arena_module
from sb3_extra_buffers.gpu_buffers.arena import CappedArena, DeviceArena, HeapBudget, pack_segments
from sb3_extra_buffers.gpu_buffers.driver import DeviceMemory
from sb3_extra_buffers.gpu_buffers.transfer import Staging
from tests.gpu.helpers import IMAGES, recorded, replay_pair, rollout_pair
from tests.transitions import add_to_replay, copied, draw, play, sample_both


def random_bytes(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, 256, size=size, dtype=np.uint8)


class TestRawBuffer:
    def test_keeps_its_bytes_when_it_grows_shrinks_and_moves(self, device: str) -> None:
        buffer = RawBuffer(10, device)
        buffer.bytes[:] = th.arange(10, dtype=th.uint8)
        buffer.resize(1000)
        buffer.resize(7)
        buffer.to("cpu")
        assert buffer.bytes.tolist() == list(range(7))
        assert isinstance(buffer.storage, th.UntypedStorage)


class TestDeviceMemory:
    def test_bytes_keep_their_places(self, device: str) -> None:
        memory = DeviceMemory(th.device(device))
        expected = np.zeros(0, np.uint8)
        rng = np.random.default_rng(0)
        for size in (10, 1_000, 3 << 20, 5 << 20, (5 << 20) + 1, 9 << 20, 40 << 20):
            memory.grow(size)
            assert len(memory) == size
            np.testing.assert_array_equal(memory.bytes[: len(expected)].cpu().numpy(), expected)
            expected = random_bytes(rng, size)
            memory.bytes.copy_(th.tensor(expected))
        np.testing.assert_array_equal(memory.bytes.cpu().numpy(), expected)

    @pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")
    def test_growth_moves_nothing_and_takes_no_more_than_needed_cuda(self) -> None:
        memory = DeviceMemory(th.device("cuda", 0))
        memory.grow(8 << 20)
        before, address = th.cuda.memory_reserved(), memory.bytes.data_ptr()
        for size in range(16 << 20, 512 << 20, 16 << 20):
            memory.grow(size)
            memory.bytes[-1] = 7
            assert memory.bytes.data_ptr() == address
        assert th.cuda.memory_reserved() == before
        assert memory._addresses is not None
        assert memory._addresses._size == 496 << 20

    @pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")
    def test_tensors_keep_it_alive_cuda(self) -> None:
        memory = DeviceMemory(th.device("cuda", 0))
        memory.grow(8 << 20)
        part = memory.bytes[5:9].fill_(3)
        del memory
        gc.collect()
        assert part.tolist() == [3] * 4

    @pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")
    def test_more_than_there_is_cuda(self) -> None:
        memory = DeviceMemory(th.device("cuda", 0))
        memory.grow(8 << 20)
        memory.bytes.fill_(5)
        with pytest.raises(th.cuda.OutOfMemoryError, match="cuMemCreate"):
            memory.grow(1 << 45)
        assert len(memory) == 8 << 20
        assert memory.bytes.eq(5).all()


class TestSharedRawHeap:
    def test_cells_survive_their_neighbours(self, device: str) -> None:
        rng = np.random.default_rng(0)
        heap = SharedRawHeap(9, device)
        expected: dict[int, np.ndarray] = {}
        for step in range(200):
            cell = int(rng.integers(9))
            expected[cell] = random_bytes(rng, int(rng.integers(0, 300)))
            heap.write(cell, th.tensor(expected[cell], device=device))
            if step % 17 == 0:
                heap.compact()
                assert heap.data_end == heap.live_bytes == sum(map(len, expected.values()))
            for cell, payload in expected.items():
                assert heap.read(cell).cpu().numpy().tobytes() == payload.tobytes()
                assert int(heap.lengths[cell]) == len(payload)

    def test_a_limit_is_kept_and_what_is_there_stays_readable(self, device: str) -> None:
        heap = SharedRawHeap(4, device, heap_bytes=100)
        for cell in range(3):
            heap.write(cell, th.full((30,), cell, dtype=th.uint8, device=device))
        with pytest.raises(CapacityError, match=re.escape("11 bytes are needed, 10 of heap_bytes=100 are available")):
            heap.write(3, th.zeros(11, dtype=th.uint8, device=device))
        heap.write(1, th.full((40,), 9, dtype=th.uint8, device=device))
        assert [heap.read(cell).unique().tolist() for cell in range(3)] == [[0], [9], [2]]
        assert len(heap.raw) <= 100

    def test_freed_cells_make_room(self, device: str) -> None:
        heap = SharedRawHeap(2, device, heap_bytes=100)
        heap.write(0, th.zeros(60, dtype=th.uint8, device=device))
        heap.free(0)
        heap.write(1, th.ones(90, dtype=th.uint8, device=device))
        assert int(heap.read(1).sum()) == 90


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("method", ["none", "delta"])
@pytest.mark.parametrize("make", [replay_pair, rollout_pair])
def test_device_bytes_count_everything_that_is_sent(make: Any, method: str, device: str) -> None:
    gc.collect()
    before = [part for part in gc.get_objects() if type(part) is Staging]
    _, ours = make(IMAGES, device, slots=4, compression_method=method, frame_stack=4)
    for transition in recorded("channels first", 2)[:4]:
        if make is replay_pair:
            add_to_replay([ours], transition)
        else:
            rest = (th.as_tensor(part, device=device) for part in (transition.action, *[transition.reward] * 4))
            ours.add(transition.obs, *rest)
    _ = ours.sample(2) if make is replay_pair else list(ours.get(4))
    counted = ours._device_tensors()
    of_it = [part for part in gc.get_objects() if type(part) is Staging and part not in before]
    assert of_it
    kept = [*(part.sent for part in of_it), *(ours._rows_on_device.values() if make is rollout_pair else ())]
    assert all(any(tensor is other for other in counted) for tensor in kept)
    assert ours.device_bytes == sum({id(tensor): tensor.nbytes for tensor in counted}.values()), "nothing twice"


def test_segments_are_packed_in_order(device: str) -> None:
    source = th.arange(100, dtype=th.uint8, device=device)
    packed = pack_segments(source, th.tensor([50, 3, 7]), th.tensor([2, 0, 3]))
    assert packed.tolist() == [50, 51, 7, 8, 9]


def put(arena: CappedArena, start: int, data: np.ndarray) -> None:
    """What a codec or a kernel does."""
    if isinstance(arena, DeviceArena):
        arena.heap[start : start + len(data)] = th.tensor(data, device=arena.heap.device)
    else:
        arena.write(start, data)


class TestArenas:
    @pytest.mark.parametrize("in_host_memory", [False, True])
    def test_blocks_survive_growth_and_wrapping(
        self, in_host_memory: bool, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(arena_module, "_SMALLEST_STEP", 1 << 12)
        rng = np.random.default_rng(0)
        budget = HeapBudget(None)
        arena = CappedArena(budget) if in_host_memory else DeviceArena(th.device(device), budget)
        live: list[tuple[int, np.ndarray]] = []
        for step in range(400):
            data = random_bytes(rng, int(rng.integers(1, 5000)))
            while (start := arena.allocate(len(data))) is None:
                boundary, shift = arena.grow(len(data))
                live = [(at + shift if shift and at >= boundary else at, block) for at, block in live]
            put(arena, start, data)
            live.append((start, data))
            # The number of live blocks goes up and down, so that the ring wraps and grows while it is wrapped.
            for _ in range(0 if step % 40 < 25 else 2):
                if len(live) > 3:
                    live.pop(0)
                    arena.free_until(live[0][0])
            if step % 120 == 119:  # leave every second one out
                live = live[::2]
                starts, lengths = np.array([at for at, _ in live]), np.array([len(block) for _, block in live])
                arena.close_gaps(starts, lengths)
                ends = np.cumsum(lengths) - lengths
                live = [(int(at), block) for at, (_, block) in zip(ends, live, strict=True)]
            if step % 20 == 19:
                heap = arena.data
                for at, block in live:
                    assert heap[at : at + len(block)].tobytes() == block.tobytes()
        assert arena.generation > 3

    def test_a_device_keeps_dead_bytes(self, device: str) -> None:
        arena = DeviceArena(th.device(device), HeapBudget(None))
        arena.grow(1 << 20)
        put(arena, 0, np.full(1 << 20, 7, dtype=np.uint8))
        arena.head = arena.tail = 1 << 19
        arena.discard_dead()
        assert (arena.data[: 1 << 20] == 7).all()

    def test_a_ring_that_is_wrapped_grows_in_pieces(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(arena_module, "_MOVED_AT_ONCE", 1000)
        arena = DeviceArena(th.device(device), HeapBudget(None))
        rng = np.random.default_rng(0)
        arena.grow(200_000)
        blocks: dict[int, np.ndarray] = {}
        for _ in range(60):
            start = arena.allocate(3_000)
            assert start is not None
            blocks[start] = random_bytes(rng, 3_000)
            put(arena, start, blocks[start])
        for start in sorted(blocks)[:30]:
            del blocks[start]
        arena.free_until(min(blocks))
        while (start := arena.allocate(3_000)) is not None:
            blocks[start] = random_bytes(rng, 3_000)
            put(arena, start, blocks[start])
        assert arena.wrap is not None
        arena._heap.grow(len(arena._heap) + 100_000)  # so that there is room to move to, and no new memory
        boundary, shift = arena.grow(3_000)
        assert shift
        data = arena.data
        for start, block in blocks.items():
            at = start + shift if start >= boundary else start
            assert data[at : at + 3_000].tobytes() == block.tobytes()

    @pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")
    def test_memory_that_was_outgrown_is_given_back_cuda(self) -> None:
        th.cuda.empty_cache()
        before = th.cuda.memory_reserved()
        space = spaces.Box(0, 255, (1, 512, 512), np.uint8)
        _, ours = replay_pair(space, "cuda", n_envs=1, slots=800, compression_method="delta", frame_stack=1)
        rng = np.random.default_rng(0)
        obs = rng.integers(0, 256, size=(1, 1, 512, 512), dtype=np.uint8)
        for step in range(800):
            next_obs = rng.integers(0, 256, size=(1, 1, 512, 512), dtype=np.uint8)
            ours.add(obs, next_obs, np.zeros(1), np.zeros(1), np.zeros(1), [{}])
            obs = next_obs
            if step % 50 == 0:
                ours.sample(4)
        assert th.cuda.memory_reserved() - before < 1.5 * ours.device_bytes + (64 << 20)


@pytest.mark.slow
class TestHeapBytes:
    @pytest.mark.parametrize("method", ["rle", "delta", "zstd"])
    @pytest.mark.parametrize("frames_per_record", [1, 4])
    def test_past_it_add_fails_and_what_was_stored_stays(
        self, method: str, frames_per_record: int, either_way: str, device: str
    ) -> None:
        if method != "delta" and frames_per_record > 1:
            pytest.skip("no chains")
        options = {"compression_kwargs": {"frames_per_record": frames_per_record}} if method == "delta" else {}
        space = spaces.Box(0, 255, (2, 60, 60), np.uint8)
        plain, ours = replay_pair(
            space, device, slots=400, compression_method=method, heap_bytes=200_000, frame_stack=2, **options
        )
        rng = np.random.default_rng(0)
        messages: list[str] = []
        for transition in itertools.islice(play(space, 2), 200):
            obs, next_obs, *rest = copied(transition)
            obs, next_obs = draw_pair(space, rng)  # noise does not compress
            try:
                ours.add(obs, next_obs, *rest)
            except CapacityError as error:
                messages.append(str(error))
            else:
                plain.add(obs, next_obs, *rest)
            if messages or plain.pos % 17 == 0:
                sample_both(plain, ours, batch_size=3, seed=plain.pos)
            if len(messages) == 5:
                break
        assert len(messages) == 5
        pattern = r"[\d,]+ bytes are needed, [\d,]+ of heap_bytes=200,000 are available"
        assert all(re.search(pattern, message) for message in messages)
        assert issubclass(CapacityError, ValueError)
        assert issubclass(CapacityError, ExtraBuffersError)
        assert 5 < plain.pos == ours.pos
        assert ours._stores[""].budget.taken <= 200_000

    def test_a_full_buffer_under_a_limit_goes_on_for_ever(self, either_way: str, device: str) -> None:
        buffers = replay_pair(IMAGES, device, slots=8, compression_method="delta", heap_bytes=8_000, frame_stack=4)
        for step, transition in enumerate(recorded("channels first", 2)):
            add_to_replay(buffers, transition)
            if step % 20 == 0:
                sample_both(*buffers, batch_size=4, seed=step)

    @pytest.mark.parametrize("method", ["rle", "delta", "zstd"])
    def test_an_environment_that_stands_still_does_not_use_it_up(
        self, method: str, either_way: str, device: str
    ) -> None:
        space = spaces.Box(0, 255, (2, 30, 30), np.uint8)
        buffers = replay_pair(space, device, slots=8, compression_method=method, heap_bytes=80_000, frame_stack=2)
        rng = np.random.default_rng(0)
        for step, transition in enumerate(itertools.islice(play(space, 2), 60 if either_way == "kernels" else 300)):
            obs, next_obs = draw_pair(space, rng)
            obs[1] = next_obs[1] = 7
            add_to_replay(buffers, transition._replace(obs=obs, next_obs=next_obs))
            if step % 30 == 29:
                sample_both(*buffers, batch_size=4, seed=step)

    def test_too_small_for_anything(self, either_way: str, device: str) -> None:
        _, ours = replay_pair(IMAGES, device, compression_method="delta", heap_bytes=10)

        def fill() -> None:
            for transition in recorded("channels first", 2):
                ours.add(*copied(transition))

        with pytest.raises(CapacityError, match="heap_bytes=10 "):
            fill()
        ours.sample(4)

    def test_keys_of_a_dict_share_it(self, device: str) -> None:
        space = spaces.Dict({"left": IMAGES, "right": IMAGES})
        plain, ours = replay_pair(space, device, slots=200, compression_method="rle", heap_bytes=30_000, frame_stack=4)
        rng = np.random.default_rng(0)

        def fill() -> None:
            for transition in itertools.islice(play(space, 2), 200):
                pair = [{key: np.stack([draw(IMAGES, rng)] * 2) for key in ("left", "right")} for _ in range(2)]
                ours.add(*pair, *transition[2:])
                plain.add(*copied(transition._replace(obs=pair[0], next_obs=pair[1])))

        with pytest.raises(CapacityError, match="heap_bytes=30,000"):
            fill()
        sample_both(plain, ours, batch_size=100, seed=0)

    def test_noise_fits_without_a_limit(self, device: str) -> None:
        space = spaces.Box(0, 255, (4, 20, 20), np.uint8)
        buffers = replay_pair(space, device, compression_method="delta")
        rng = np.random.default_rng(0)
        for step, transition in enumerate(itertools.islice(play(space, 2), 60)):
            obs, next_obs = draw_pair(space, rng)
            add_to_replay(buffers, transition._replace(obs=obs, next_obs=next_obs))
            if step % 20 == 19:
                sample_both(*buffers, batch_size=40, seed=step)

    def test_max_slot_bytes_is_deprecated(self) -> None:
        with pytest.warns(DeprecationWarning, match="heap_bytes"):
            _, ours = replay_pair(IMAGES, "cpu", slots=10, compression_method="rle", max_slot_bytes=50)
        assert ours._stores[""].budget.limit == 50 * 10 * 2 * 2


def draw_pair(space: spaces.Box, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    obs, next_obs = (np.stack([draw(space, rng) for _ in range(2)]) for _ in range(2))
    return obs, next_obs
