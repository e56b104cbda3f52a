"""Files of this and earlier versions can be read, and what is in them is what was in them."""

from __future__ import annotations

import numpy as np
import pytest
import stable_baselines3

from sb3_extra_buffers.codecs.registry import parse_method
from tests.methods import METHODS
from tests.persistence.make_fixtures import FIXTURES, FOLDER, batch_of
from tests.transitions import assert_same


@pytest.mark.parametrize("name", FIXTURES)
def test_a_file_that_was_kept(name: str) -> None:
    method = parse_method(FIXTURES[name][1]["compression_method"]).name
    if method not in METHODS:
        pytest.skip(f"{method} is not installed")
    found = batch_of(name)
    with np.load(FOLDER / f"{name}.npz") as expected:
        assert set(found) == set(expected.files)
        for key in expected.files:
            wanted = expected[key]
            if stable_baselines3.__version__ == "2.7.0" and "Rollout" in FIXTURES[name][0]:
                wanted = wanted.astype(found[key].dtype)  # it keeps rollouts as float32
            assert_same(found[key], wanted)


def test_every_file_is_looked_at() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*FIXTURES, *(f"{name}.npz" for name in FIXTURES)}
