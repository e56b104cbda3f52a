"""The environment of a history: small constants, a reproducible clock, and device code on a CPU."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from sb3_extra_buffers.storage.choice import PlannedTrials
from tests.histories.plans import Plan

SMALL: dict[str, dict[str, Any]] = {
    "codecs.delta_zstd": {
        "_DICTIONARY_BYTES": 1 << 11,
        "_FIRST_BYTES": 1 << 9,
        "_SAMPLE_BYTES": 1 << 8,
        "_SAMPLING_INTERVALS": (1, 2),
        "_BASELINE_RECORDS": 8,
        "_RENEWAL_FACTOR": 0.25,
    },
    "codecs.zstd_dict": {
        "_DICTIONARY_FRAMES": 3,
        "_SAMPLES": 8,
        "_SAMPLING_INTERVAL": 3,
        "_BASELINE_RECORDS": 24,
        "_RENEWAL_FACTOR": 0.25,
    },
    "gpu_buffers.arena": {"_SMALLEST_STEP": 1 << 8, "_MOVED_AT_ONCE": 1 << 9},
    "gpu_buffers.frame_store": {"_RING_FRAMES": 24},
    "gpu_buffers.observation_store": {"REVIEW_STEPS": 40, "_FRAMES_PER_SLOT": 0.0},
    "persistence.folder": {"_WORTH_A_FLUSH": 1 << 13},
    "storage.arena": {"_SMALLEST_STEP": 1 << 8},
    "storage.auto": {
        "TRIALS": [PlannedTrials(begin, 14, 0.0) for begin in (20, 50, 80, 110, 200, 300, 400)],
        "_FEWEST_FRAMES": 8,
    },
    "storage.choice": {"_FEWEST_STEPS": 24, "_MOST_STEPS": 48},
    "storage.extent_arena": {"_SMALLEST_STEP": 1 << 10, "_MOST_BYTES_TO_MOVE": 1 << 16},
    "storage.gathering": {"_CACHE_BYTES": 1 << 14},
    "storage.memory": {"_PIECE": 1 << 10},
    "storage.observation_index": {"_WORTH_COMPACTING": 1 << 12, "_PIECE": 7},
    "storage.observation_store": {
        "_DECISION_STEPS": 20,
        "_FEWEST_STEPS": 12,
        "REVIEW_STEPS": 40,
        "_LAST_FRAME_NUMBER": 400,
    },
    "storage.reading_time": {"_MEASUREMENTS": 2, "_PARTS": 2},
    "storage.record_index": {"_PIECE": 5},
}
"""Constants that determine how often rare events happen. Stored data does not depend on them."""


@contextlib.contextmanager
def surroundings(plan: Plan, rng: np.random.Generator) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if plan.shrunk:
            for module_name, constants in SMALL.items():
                module = importlib.import_module(f"sb3_extra_buffers.{module_name}")
                for name, value in constants.items():
                    stack.enter_context(patch.object(module, name, value))
        stack.enter_context(_seeded_clock(rng))
        stack.enter_context(_device_path(plan.path))
        yield


@contextlib.contextmanager
def _seeded_clock(rng: np.random.Generator) -> Iterator[None]:
    """Draw the times that ``auto`` measures, so that its choice is reproducible and every candidate is sometimes
    chosen."""
    from sb3_extra_buffers.storage import choice, reading_time

    times = itertools.accumulate(float(rng.exponential(1e-4)) for _ in itertools.count())
    clock = partial(next, times)
    with patch.object(choice, "cpu_time", clock), patch.object(reading_time, "cpu_time", clock):
        yield


@contextlib.contextmanager
def _device_path(path: str) -> Iterator[None]:
    """With ``kernels``, device code runs on the CPU, in Triton's interpreter. Otherwise GPU buffers on a CPU use host
    memory, as users' do."""
    with patch.dict("os.environ", {"TRITON_INTERPRET": "1" if path == "kernels" else "0"}):
        yield
