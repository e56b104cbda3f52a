"""Checksums of observations."""

from __future__ import annotations

import numpy as np
import pytest

from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.storage.digests import ObservationDigests, digests_of


@pytest.mark.parametrize("shape", [(0, 4, 5), (0,), (3, 0)])
def test_of_batches_without_observations_or_elements(shape: tuple[int, ...]) -> None:
    """As when hindsight replay makes new goals for a whole batch, and none is left as it was."""
    assert digests_of(np.zeros(shape, np.float32)).shape == shape[:1]


def test_one_that_differs_is_named() -> None:
    digests, observations = ObservationDigests(1, 3, 2), np.arange(12, dtype=np.uint8).reshape(3, 4)
    slots, envs = np.array([0, 1, 2]), np.array([0, 1, 0])
    digests.columns[0][slots, envs] = digests_of(observations)
    digests.compare(0, slots, envs, observations)
    observations[1, 3] += 1
    with pytest.raises(CorruptDataError, match="slot 1 of environment 1"):
        digests.compare(0, slots, envs, observations)
