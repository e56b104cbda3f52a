"""Slots that are overwritten in random order leave dead frames behind, which are removed; in turn, they leave none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sb3_extra_buffers.storage.config import StorageConfig
from sb3_extra_buffers.storage.observation_index import ObservationIndex
from sb3_extra_buffers.storage.observation_store import ObservationStore

SHAPE, N_ENVS = (40, 40, 1), 3
CONFIG = StorageConfig.from_arguments("none", None, None, None, None)


def make(n_slots: int) -> ObservationStore:
    return ObservationStore(n_slots, N_ENVS, SHAPE, np.dtype(np.uint8), CONFIG, 2)


def observations(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, (N_ENVS, *SHAPE), dtype=np.uint8)


def test_dead_frames_are_removed() -> None:
    rng, store = np.random.default_rng(0), make(200)
    for t in range(200):
        store.write(0, t, observations(rng))
    used = 200 * N_ENVS * math.prod(SHAPE)
    expected = {}
    for _ in range(1500):
        slot = int(rng.integers(1, 200))  # the first one keeps all later frames alive
        expected[slot] = observations(rng)
        store.write(0, slot, expected[slot])
    store.check()
    assert store.payload_bytes < 3 * used
    for slot, values in expected.items():
        (found,) = store.read([(0, np.full(N_ENVS, slot))], np.arange(N_ENVS))
        assert np.array_equal(found, values)


@pytest.mark.parametrize("n_steps", [100, 700, 1500])
def test_a_buffer_that_is_filled_in_turn_is_not_searched(n_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(self: ObservationIndex) -> None:
        raise AssertionError("all slots were searched")

    monkeypatch.setattr(ObservationIndex, "_frames_in_use", search)
    rng, store = np.random.default_rng(0), make(500)
    for t in range(n_steps):
        store.place_step(t % 500, store.stage(t % 500, (observations(rng), observations(rng))))
        store.finish_step()
    store.compact()
