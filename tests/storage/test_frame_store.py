"""The frame store gives back every frame that is still wanted, whatever was released, grown or cleared in between."""

from __future__ import annotations

import copy
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_extra_buffers.codecs import delta_zstd
from sb3_extra_buffers.codecs.registry import available_methods, create_codec
from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.storage import frame_store
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.observation_index import mean_frame_bytes
from sb3_extra_buffers.storage.pickling import unpickled
from sb3_extra_buffers.storage.stacking import StackLayout

SHAPE = (3, 5, 4)
LAYOUT = StackLayout(SHAPE, np.dtype(np.uint8), stack=3)


class Model:
    """A frame store, and beside it every observation that is still wanted, with the place it was said to be at."""

    def __init__(self, method: str, n_lanes: int = 2, keep: int = 10) -> None:
        self.method, codec = method, create_codec(method, LAYOUT.frame)
        self.store = FrameStore(codec, n_lanes, LAYOUT)
        self.wanted = [deque(maxlen=keep) for _ in range(n_lanes)]
        self.rng = np.random.default_rng(0)
        self.background = self.rng.integers(0, 256, size=SHAPE[1:], dtype=np.uint8)
        self.now = np.zeros((n_lanes, *SHAPE), np.uint8)

    def oldest(self) -> np.ndarray:
        nothing = np.iinfo(np.int64).max
        return np.array([lane[0][0] - LAYOUT.stack if lane else nothing for lane in self.wanted])

    def append(self, lanes: list[int], shift: int) -> None:
        """Move the observations of some lanes on by some frames."""
        lanes_array = np.array(lanes)
        for _ in range(shift):
            frames = np.repeat(self.background[None, None], len(lanes), axis=0)
            frames[..., self.rng.integers(5), self.rng.integers(4)] = self.rng.integers(256)
            self.now[lanes_array] = np.concatenate([self.now[lanes_array][:, 1:], frames], axis=1)
        ends = self.store.append(lanes_array, self.now[lanes_array], self.oldest)
        for lane, end in zip(lanes, ends.tolist(), strict=True):
            self.wanted[lane].append((end, self.now[lane].copy()))

    def copy(self, duplicate: Callable[[Any], Any]) -> None:
        """Go on with a copy of the store."""
        state = unpickled(duplicate(self.store.state()))
        self.store = FrameStore(create_codec(self.method, LAYOUT.frame), self.store.n_lanes, LAYOUT)
        self.store.restore(state)

    def check(self) -> None:
        places = [(lane, end, obs) for lane, kept in enumerate(self.wanted) for end, obs in kept]
        if not places:
            return
        lanes = np.array([lane for lane, _, _ in places])
        firsts = np.array([end for _, end, _ in places]) - LAYOUT.stack
        outs = [np.empty((len(lanes), LAYOUT.stack, LAYOUT.frame.nbytes), np.uint8) for _ in range(2)]
        order = np.random.default_rng(1).permutation(len(lanes))
        self.store.gather(lanes, np.stack([firsts, firsts]), outs)
        assert np.array_equal(outs[0], outs[1])
        self.store.gather(lanes[order], firsts[order][None], outs[:1])
        expected = np.stack([obs for _, _, obs in places]).reshape(outs[0].shape)
        assert np.array_equal(outs[0], expected[order])
        assert np.array_equal(outs[1], expected)


steps = st.tuples(st.sampled_from([[0, 1], [0, 1], [1, 0], [0], [1]]), st.integers(0, 4))
operations = st.lists(st.one_of(*[st.lists(steps, max_size=20)] * 4, st.sampled_from(["clear", "copy"])), max_size=12)


@pytest.mark.parametrize("method", available_methods())
@settings(max_examples=10)
@given(operations=operations)
def test_any_sequence_of_operations(method: str, operations: list[Any]) -> None:
    model = Model(method)
    for operation in operations:
        if operation == "clear":
            model.store.clear()
            for lane in model.wanted:
                lane.clear()
        elif operation == "copy":
            model.copy(copy.deepcopy)
        else:
            for lanes, shift in operation:
                model.append(lanes, shift)
        model.check()


@pytest.mark.parametrize("method", available_methods())
def test_many_observations_take_no_more_than_the_last_ones(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_zstd, "_DICTIONARY_BYTES", 1 << 12)  # its last one is soon there
    model = Model(method, n_lanes=3, keep=100)
    sizes = []
    for step in range(1000):
        model.append([0, 1, 2], 1)
        if step % 100 == 0:
            model.check()
            sizes.append(model.store.arena.nbytes + model.store.index_bytes + model.store.reference_bytes)
    assert sizes[-1] <= 1.1 * sizes[3]


@pytest.mark.parametrize("method", available_methods())
def test_the_index_knows_what_the_arena_holds(method: str) -> None:
    model = Model(method, keep=50)
    for _ in range(200):
        model.append([0, 1], 1)
    model.store.release(model.oldest())
    n_frames = model.store.encoded - model.store.first_records * model.store.codec.frames_per_record
    estimated = float(mean_frame_bytes(model.store) @ n_frames)
    assert estimated == pytest.approx(model.store.arena.live_bytes, rel=0.01)


@pytest.mark.parametrize("method", available_methods())
def test_a_pickled_store_goes_on_where_it_was(method: str) -> None:
    model = Model(method)
    for _ in range(50):
        model.append([0, 1], 1)
    model.copy(lambda state: pickle.loads(pickle.dumps(state)))
    model.check()
    for _ in range(50):
        model.append([0, 1], 1)
    model.check()


def test_the_index_of_a_large_store_has_room_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def grow(self: FrameStore) -> None:
        raise AssertionError("the index was copied")

    monkeypatch.setattr(frame_store, "_LARGE_INDEX", 16)
    slots, n_envs = 200, 3
    space = spaces.Box(0, 255, (32, 32, 1), np.uint8)
    buffer = CompressedReplayBuffer(
        slots * n_envs, space, spaces.Discrete(2), "cpu", n_envs, compression_method="delta"
    )
    frames = np.random.default_rng(0).integers(0, 256, (3 * slots + 1, n_envs, 32, 32, 1), dtype=np.uint8)
    zeros = np.zeros(n_envs)
    for t in range(3 * slots):
        if t == 10:  # how observations stack frames is known
            monkeypatch.setattr(FrameStore, "_grow_index", grow)
            assert buffer._stores[""].frames.index_bytes <= 16 * n_envs
        buffer.add(frames[t], frames[t + 1], zeros, zeros, zeros, [{}] * n_envs)
    buffer.check()
    np.testing.assert_array_equal(np.asarray(buffer.observations), frames[2 * slots : -1])
    np.testing.assert_array_equal(np.asarray(buffer.next_observations), frames[2 * slots + 1 :])
