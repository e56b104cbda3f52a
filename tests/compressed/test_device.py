"""Where batches go is known in one place, which can be told anew."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch as th

from tests.persistence.buffers import ALL_CLASSES, SLOTS, add, draw, make, steps_for
from tests.transitions import assert_same


@pytest.mark.parametrize("name", [name for name in ALL_CLASSES if name.startswith("Compressed")])
def test_what_was_pickled_on_a_machine_with_a_gpu_works_on_one_without(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = make(name)
    steps = steps_for(buffer, SLOTS)
    with monkeypatch.context() as there:
        there.setattr(th.cuda, "is_available", lambda: True)
        elsewhere = make(name, device="cuda")
    assert elsewhere.device.type == "cuda"
    for number, step in enumerate(steps):
        add(buffer, step, number)
        add(elsewhere, step, number)
    loaded = pickle.loads(pickle.dumps(elsewhere))
    if "Her" in name:
        loaded.set_env(buffer.env)
    loaded.device = th.device("cpu")  # as load_replay_buffer() does
    assert_same(draw(loaded, 1), draw(buffer, 1))


@pytest.mark.skipif(th.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("name", ["CompressedReplayBuffer", "CompressedDictReplayBuffer", "CompressedRolloutBuffer"])
def test_arrays_can_be_read_while_batches_are_to_go_to_a_gpu_that_is_not_here(name: str) -> None:
    buffer = make(name)
    for number, step in enumerate(steps_for(buffer, SLOTS - 1)):
        add(buffer, step, number)
    arrays = buffer.observations if isinstance(buffer.observations, dict) else {"": buffer.observations}
    before = {key: np.asarray(array) for key, array in arrays.items()}
    buffer.device = th.device("cuda")
    for key, array in arrays.items():
        assert np.array_equal(np.asarray(array), before[key])
