"""Batches decoded by kernels: by how many threads and with which library does not matter to what comes out."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch as th

from sb3_extra_buffers import parallel
from sb3_extra_buffers.codecs import libzstd
from sb3_extra_buffers.codecs.base import FrameSpec
from sb3_extra_buffers.codecs.registry import create_codec
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.parallel import ALONE, Team, alone, learn_from, team_for
from sb3_extra_buffers.storage import compiled_gathering
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.pickling import unpickled
from sb3_extra_buffers.storage.stacking import StackLayout
from tests.compressed.test_segments import fill, make
from tests.methods import installed

N_LANES, STEPS = 3, 400
SHAPE = (1, 60, 60)
ZSTD = [*installed("zstd", "zstd-dict"), *(f"{name} x8" for name in installed("zstd-dict"))]
METHODS = [*installed("none", "delta", "bitpack", "pixel-lz"), *ZSTD]


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = th.get_num_threads()
    th.set_num_threads(2)
    for name in ("_backoff", "_n_alone", "_time_alone"):
        monkeypatch.setattr(parallel, name, 0)
    yield
    th.set_num_threads(before)


def walks() -> np.ndarray:
    """Frames of which little changes from one step to the next."""
    rng = np.random.default_rng(0)
    frames = np.repeat(rng.integers(0, 4, (1, N_LANES, *SHAPE), dtype=np.uint8), STEPS, axis=0)
    for step in range(1, STEPS):
        frames[step] = frames[step - 1]
        frames[step, :, 0, step % 60, :20] = rng.integers(0, 255, (N_LANES, 20))
    return frames


def filled(method: str) -> tuple[FrameStore, np.ndarray]:
    name, _, group = method.partition(" x")
    layout = StackLayout(SHAPE, np.dtype(np.uint8))
    options = {"frames_per_record": int(group)} if group else {}
    store = FrameStore(create_codec(name, layout.frame, **options), N_LANES, layout)
    frames = walks()
    for frame in frames:
        store.append(np.arange(N_LANES), frame, lambda: np.zeros(N_LANES, np.int64))
    return store, frames


def batch(store: FrameStore, n: int = 600) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Large enough for several threads."""
    rng = np.random.default_rng(1)
    lanes, firsts = rng.integers(0, N_LANES, n), rng.integers(0, STEPS, (2, n))
    outs = [np.zeros((n, 1, store.codec.frame.nbytes), np.uint8) for _ in range(2)]
    store.gather(lanes, firsts, outs)
    return lanes, firsts, np.stack(outs)


@pytest.mark.parametrize("method", METHODS)
def test_one_thread_or_several(method: str) -> None:
    store, frames = filled(method)
    lanes, firsts, several = batch(store)
    th.set_num_threads(1)
    np.testing.assert_array_equal(batch(store)[2], several)
    np.testing.assert_array_equal(several.reshape(*firsts.shape, *SHAPE), frames[firsts, lanes])


@pytest.mark.parametrize("method", ZSTD)
def test_without_libzstd_every_record_is_a_call(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = filled(method)
    expected = batch(store)[2]
    monkeypatch.setattr(libzstd, "decompress_function", lambda: 0)
    np.testing.assert_array_equal(batch(store)[2], expected)


def test_dictionaries_without_statistics_serve_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zstandard")
    with_statistics, _ = filled("zstd-dict")
    monkeypatch.setattr(libzstd, "_library", lambda: None)
    plain, _ = filled("zstd-dict")
    monkeypatch.undo()
    plain.restore(unpickled(plain.state()))  # as on a machine where libzstd can be loaded
    np.testing.assert_array_equal(batch(plain)[2], batch(with_statistics)[2])
    assert with_statistics.arena.live_bytes < plain.arena.live_bytes


def test_frames_that_begin_like_a_dictionary_are_not_taken_for_one() -> None:
    pytest.importorskip("zstandard")
    frame = FrameSpec(400, np.dtype(np.uint8))
    codec = create_codec("zstd-dict", frame)
    records = np.random.default_rng(0).integers(0, 9, (80, 400), dtype=np.uint8)
    records[:, :4] = np.frombuffer((0xEC30A437).to_bytes(4, "little"), np.uint8)
    lanes = np.zeros(len(records), np.int64)
    encoded = [codec.encode(records[i : i + 1], lanes[:1]) for i in range(len(records))]
    for record, (data, lengths, references) in zip(records, encoded, strict=True):
        out = np.empty((1, 400), np.uint8)
        codec.decode(data, np.zeros(1, np.int64), lengths, references, out)
        np.testing.assert_array_equal(out[0], record)


def test_indices_may_be_read_only() -> None:
    """As those are that come from JAX, and those of np.broadcast_to."""
    buffer = make(compression_method="delta", frame_stack=4)
    fill(buffer, steps=80)
    slots, envs = np.arange(50), np.zeros(50, dtype=np.int64)
    expected = buffer.observations[slots, envs]
    for array in (slots, envs):
        array.flags.writeable = False
        np.testing.assert_array_equal(buffer.observations[slots, envs], expected)


@pytest.mark.parametrize("method", ZSTD)
def test_corrupt_records_are_refused(method: str) -> None:
    store, _ = filled(method)
    store.arena.data[: store.arena.limit] ^= 0x5A
    with pytest.raises(CorruptDataError):
        batch(store)


def test_a_dictionary_that_is_not_there_is_refused() -> None:
    pytest.importorskip("zstandard")
    store, _ = filled("zstd-dict")
    store.index.references[:] = 99
    with pytest.raises(CorruptDataError):
        batch(store)


@pytest.mark.parametrize("method", METHODS)
def test_places_whose_end_overflows_are_refused(method: str) -> None:
    store, _ = filled(method)
    store.index.starts[:] = np.iinfo(np.int64).max - 5
    with pytest.raises(CorruptDataError):
        store.check()
    with pytest.raises(CorruptDataError):
        batch(store)


def test_dictionaries_are_freed_with_their_last_record() -> None:
    pytest.importorskip("zstandard")
    store, _ = filled("zstd-dict")
    batch(store)
    before = alive(libzstd.Dictionary)
    store.release(store.heads.copy())
    assert alive(libzstd.Dictionary) < before


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(thing) is kind for thing in gc.get_objects())


def test_only_the_thread_that_asked_for_it_decodes_alone() -> None:
    found: list[bool] = []
    with alone():
        other = threading.Thread(target=lambda: found.append(parallel.is_alone()))
        other.start()
        other.join()
        assert parallel.is_alone()
    assert found == [False]
    assert not parallel.is_alone()


class TestTeam:
    def test_little_work_is_done_alone(self) -> None:
        assert team_for(1000) == ALONE

    def test_what_is_measured_is_done_alone(self) -> None:
        with alone():
            assert team_for(1 << 30) == ALONE
        assert team_for(1 << 30) != ALONE

    def test_torch_says_how_many_threads(self) -> None:
        th.set_num_threads(1)
        assert team_for(1 << 30) == ALONE
        th.set_num_threads(2)
        team = team_for(1 << 30)
        assert team is None or team.n_threads == 2

    def test_few_threads_are_woken_up_while_a_gpu_trains(self, monkeypatch: pytest.MonkeyPatch) -> None:
        th.set_num_threads(16)
        team = team_for(1 << 30)
        assert team is None or team.n_threads == 16
        monkeypatch.setattr(th.cuda, "is_initialized", lambda: True)
        team = team_for(1 << 30)
        assert team is None or team.n_threads == 4

    def test_threads_of_the_user_bring_no_further_ones(self) -> None:
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(team_for(1 << 30)))
        thread.start()
        thread.join()
        assert found == [None]

    def test_a_team_that_comes_late_pauses(self) -> None:
        """On a busy machine, for longer and longer. It is tried again, and used again once it comes in time."""
        th.set_num_threads(2)
        team = team_for(1 << 30)
        if team is None:
            pytest.skip("torch has no OpenMP here")
        for pause in (1, 3, 7, 15, 31, 63, 127, 128, 128):
            learn_from(team, 1, 10.0)
            for _ in range(pause):
                assert team_for(1 << 30) == ALONE
                learn_from(ALONE, 1, 1.0)
            assert team_for(1 << 30) == team
        learn_from(team, 2, 10.0)
        assert team_for(1 << 30) == team

    def test_a_team_that_comes_late_but_takes_no_longer_goes_on(self) -> None:
        """It only had to be woken up. One batch alone shows that."""
        th.set_num_threads(2)
        team = team_for(1 << 30)
        if team is None:
            pytest.skip("torch has no OpenMP here")
        learn_from(team, 1, 1.5)
        assert team_for(1 << 30) == ALONE
        learn_from(ALONE, 1, 1.0)
        for _ in range(3):
            assert team_for(1 << 30) == team
            learn_from(team, 1, 1.5)
        assert team_for(1 << 30) == team
        learn_from(team, 1, 10.0)
        assert team_for(1 << 30) == ALONE

    @pytest.mark.parametrize("n_rows", [1, 2, 3, 33])
    def test_the_kernel_tells_how_many_threads_came_in_time(self, n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        store, _ = filled("delta")
        told: list[int] = []
        monkeypatch.setattr(compiled_gathering, "learn_from", lambda team, n_in_time, time: told.append(n_in_time))
        team = Team(parallel._parallel_function(), 2)
        if not team.parallel:
            pytest.skip("torch has no OpenMP here")
        monkeypatch.setattr(compiled_gathering, "team_for", lambda n_bytes: team)
        lanes, firsts = np.zeros(n_rows, dtype=np.int64), np.full((1, n_rows), store.base[0])
        out = np.empty((n_rows, store.layout.stack, store.codec.frame.nbytes), dtype=np.uint8)
        store.gather(lanes, firsts, [out])
        assert (out == out[0]).all()
        assert told in ([1], [2])
