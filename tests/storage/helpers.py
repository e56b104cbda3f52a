"""Stores of images for the tests of ``auto``."""

from __future__ import annotations

import numpy as np

from sb3_extra_buffers.storage.config import StorageConfig
from sb3_extra_buffers.storage.observation_store import ObservationStore

AUTO = StorageConfig.from_arguments("auto", None, None, None, "auto")
IMAGE = (1, 60, 60)


def scene(rng: np.random.Generator, steps: int, n_envs: int = 1) -> np.ndarray:
    """A background in front of which some pixels change."""
    images = np.repeat(rng.integers(0, 256, (1, n_envs, *IMAGE), dtype=np.uint8), steps, axis=0)
    for step in images.reshape(steps, -1):
        step[rng.integers(0, step.size, 20)] = rng.integers(0, 256, 20)
    return images


def store_of(n_slots: int, dtype: type = np.uint8, shape: tuple[int, ...] = IMAGE) -> ObservationStore:
    return ObservationStore(n_slots, 1, shape, np.dtype(dtype), AUTO)
