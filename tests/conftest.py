"""What all tests share: one thread for torch, Ctrl-C, and Hypothesis runs that are the same every time."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch as th
from hypothesis import HealthCheck, settings

from sb3_extra_buffers.interruption import uninterrupted

# The suite runs in as many processes as there are cores. Torch's threads would only get in their way.
th.set_num_threads(1)

# A shell starts programs in the background with Ctrl-C ignored, which some tests send to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def ctrl_c_stays_possible() -> Iterator[None]:
    """A block that delays Ctrl-C for ever would make other tests fail, which have nothing to do with it."""
    yield
    assert not isinstance(signal.getsignal(signal.SIGINT), uninterrupted)
