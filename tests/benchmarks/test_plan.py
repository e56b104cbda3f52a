"""What is measured is large enough."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.plan import FULL, GAME
from benchmarks.sections.scaling import RECORDED_ENVS
from benchmarks.studies.scaling import STEPS_WITH_MANY
from sb3_extra_buffers.storage.config import StorageConfig
from sb3_extra_buffers.storage.observation_store import ObservationStore


@pytest.mark.parametrize(
    "steps", [min(FULL.sizes) // RECORDED_ENVS, FULL.game_steps, FULL.data[GAME].steps // 4 * 3, STEPS_WITH_MANY]
)
@pytest.mark.parametrize("n_envs", [1, 4, 256])
def test_auto_settles_on_a_method_while_a_buffer_is_filled(steps: int, n_envs: int) -> None:
    config = StorageConfig.from_arguments("auto", None, None, None, None)
    store = ObservationStore(steps, n_envs, (1, 84, 84), np.dtype(np.uint8), config)
    assert 0 < store.steps_until_settled <= steps
