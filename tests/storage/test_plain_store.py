"""Vectors as plain rows: exact whatever happens, and next observations are shared."""

from __future__ import annotations

import signal
import sys
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.storage import plain_store
from sb3_extra_buffers.storage.config import StorageConfig
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.pickling import unpickled
from sb3_extra_buffers.storage.plain_store import PlainStore, suits

AUTO = StorageConfig(None)
FLOATS = np.dtype(np.float64)


def make(n_slots: int, n_envs: int, n_columns: int = 2, shape: tuple[int, ...] = (3,), **kwargs: Any) -> PlainStore:
    return PlainStore(n_slots, n_envs, shape, FLOATS, AUTO, n_columns, **kwargs)


class Interrupt:
    """Raises KeyboardInterrupt when a number of lines of the store have run."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != plain_store.__file__:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> None:
        sys.settrace(self)

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)


class History:
    """A store, and SB3's arrays beside it."""

    def __init__(self, n_slots: int, n_envs: int, n_columns: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.store = make(n_slots, n_envs, n_columns, verify=bool(seed % 2))
        self.arrays = np.zeros((n_columns, n_slots, n_envs, 3))
        self.pos = 0
        self.newest = self.observations(n_envs)

    def observations(self, n: int) -> Any:
        return self.rng.choice([0.0, -0.0, 1.0, np.nan, np.inf], (n, 3))

    def step(self) -> None:
        """As a replay buffer adds a step."""
        store, pos = self.store, self.pos
        n_slots = store.n_slots
        pair = [self.newest.copy(), self.observations(store.n_envs)]
        self.newest = pair[1].copy()
        ended = self.rng.random(store.n_envs) < self.rng.choice([0, 0.3])
        self.newest[ended] = self.observations(int(ended.sum()))
        if self.rng.random() < 0.05:
            pos = int(self.rng.integers(n_slots))  # out of turn
        places = [(0, pos), (1, pos) if store.n_columns == 2 else (0, (pos + 1) % n_slots)]
        staged = store.stage(pos, store.checked_pair(*pair))
        try:
            with Interrupt(int(self.rng.integers(1, 120))):
                store.place_step(pos, staged)
        except KeyboardInterrupt:
            store.place_step(pos, staged)
        for (column, slot), values in zip(places, pair, strict=True):
            self.arrays[column, slot] = values
        store.finish_step()
        self.pos = (pos + 1) % n_slots

    def write(self) -> None:
        """As a user assigns observations."""
        store = self.store
        column, slot = int(self.rng.integers(store.n_columns)), int(self.rng.integers(store.n_slots))
        lanes = self.rng.permutation(store.n_envs)[: self.rng.integers(1, store.n_envs + 1)]
        values = self.observations(len(lanes))
        store.write(column, slot, values, lanes)
        self.arrays[column, slot, lanes] = values

    def clear(self) -> None:
        self.store.clear()
        self.arrays[:] = 0

    def restore(self) -> None:
        store = self.store
        copy = make(store.n_slots, store.n_envs, store.n_columns, verify=store.digests is not None)
        copy.restore(unpickled({key: _copied(value) for key, value in store.state().items()}))
        self.store = copy

    def compare(self) -> None:
        store = self.store
        store.check()
        slots, envs = (grid.reshape(-1) for grid in np.mgrid[: store.n_slots, : store.n_envs])
        for column, expected in enumerate(self.arrays):
            (found,) = store.read([(column, slots)], envs)
            assert found.tobytes() == expected.tobytes()


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("n_columns", [1, 2])
@pytest.mark.parametrize(("n_slots", "n_envs"), [(1, 1), (1, 3), (2, 2), (3, 1), (7, 3), (20, 2), (3, 17)])
def test_any_history_reads_as_sb3s_arrays_would(n_slots: int, n_envs: int, n_columns: int) -> None:
    for seed in range(4):
        history = History(n_slots, n_envs, n_columns, seed)
        operations = [history.step, history.write, history.clear, history.restore]
        for _ in range(250):
            history.rng.choice(operations, p=[0.9, 0.06, 0.01, 0.03])()  # type: ignore[arg-type]
            history.compare()


def test_next_observations_take_no_memory_but_at_the_ends_of_episodes() -> None:
    store, observations = make(1000, 2), np.random.default_rng(0).normal(size=(5001, 2, 3))
    for t in range(5000):
        following = observations[t + 1].copy()
        if t % 50 == 49:
            following[0] += 1
        store.place_step(t % 1000, store.checked_pair(observations[t], following))
    row = 3 * FLOATS.itemsize
    assert store.payload_bytes <= (2000 + 4 + 1000 // 50 + 1) * row


def test_ctrl_c_while_everything_is_removed_comes_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(4, 1)
    steps = [np.full((1, 3), value, dtype=store.dtype) for value in range(6)]
    for slot in range(4):
        store.place_step(slot, (steps[slot].tobytes(), steps[slot + 1].tobytes(), None))
    forget = store._forget

    def press_and_forget() -> None:
        signal.raise_signal(signal.SIGINT)
        forget()

    monkeypatch.setattr(store, "_forget", press_and_forget)
    with pytest.raises(KeyboardInterrupt):
        store.clear()
    store.check()
    for slot in range(2):
        store.place_step(slot, (steps[slot + 1].tobytes(), steps[slot + 2].tobytes(), None))
    store.check()
    slots, envs = np.arange(2), np.zeros(2, dtype=np.int64)
    (following,) = store.read([(1, slots)], envs)
    np.testing.assert_array_equal(following[:, 0], [2, 3])


def test_rows_that_were_lost_are_found_again() -> None:
    store = make(4, 2)
    for t in range(200):
        step = np.random.default_rng(t).normal(size=(2, 2, 3))
        store.place_step(t % 4, store.checked_pair(*step))
        store._free_rows.clear()  # as if each step had been interrupted
        store.check()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("next_rows", lambda rows: rows + 1),
        ("next_rows", lambda rows: np.full_like(rows, 2**32 - 1)),
        ("next_rows", lambda rows: np.full_like(rows, 1)),
        ("next_rows", lambda rows: np.full_like(rows, rows.max())),
        ("next_rows", lambda rows: rows[:-1]),
        ("own_rows", lambda rows: rows[:1]),
        ("own_rows", lambda rows: np.zeros((100, 3))),
        ("newest", lambda newest: 77),
        ("newest", lambda newest: 1),
        ("turn", lambda turn: 2),
        ("slots_used", lambda used: 99),
        ("observations", lambda values: values.astype(np.float32)),
    ],
)
def test_a_corrupt_state_is_refused(name: str, change: Any) -> None:
    history = History(5, 2, 2, seed=1)
    for _ in range(12):
        history.step()
    state = dict(history.store.state())
    state[name] = change(state[name])
    with pytest.raises(CorruptDataError):
        make(5, 2, verify=True).restore(unpickled(state))


def test_what_earlier_versions_stored_as_frames_is_read() -> None:
    earlier = ObservationStore(6, 2, (3,), FLOATS, AUTO, 2)
    rng = np.random.default_rng(0)
    for t in range(20):
        for column in (0, 1):
            earlier.write(column, t % 6, rng.normal(size=(2, 3)))
    store = make(6, 2)
    store.restore(unpickled(earlier.state()))
    store.check()
    slots, envs = (grid.reshape(-1) for grid in np.mgrid[:6, :2])
    wanted = [(0, slots), (1, slots)]
    for found, expected in zip(store.read(wanted, envs), earlier.read(wanted, envs), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_which_observations_are_stored_as_rows() -> None:
    named = StorageConfig.from_arguments("zstd", None, None, None, "auto")
    none = StorageConfig.from_arguments("none", None, None, None, "auto")
    assert suits(AUTO, (348,), FLOATS)
    assert suits(none, (348,), FLOATS)
    assert suits(AUTO, (7, 7, 3), np.dtype(np.uint8))
    assert not suits(named, (348,), FLOATS)
    assert not suits(AUTO, (84, 84, 1), np.dtype(np.uint8))
    assert not suits(AUTO, (28224,), np.dtype(np.uint8))
    assert not suits(StorageConfig(None, frame_stack=4), (8,), FLOATS)
    assert suits(StorageConfig(None, np.dtype(np.float32)), (1000,), FLOATS)
    assert suits(StorageConfig(None, prefer="memory"), (17,), FLOATS)
    assert not suits(StorageConfig(None, prefer="memory"), (105,), FLOATS)


def test_buffers_store_vectors_as_rows() -> None:
    space, actions = spaces.Box(-1, 1, (5,), np.float32), spaces.Discrete(2)
    buffer = CompressedReplayBuffer(10, space, actions, "cpu")
    assert isinstance(buffer._stores[""], PlainStore)
    assert buffer.memory_usage().method == "none (auto)"
