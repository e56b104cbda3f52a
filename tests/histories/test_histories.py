"""What SB3's buffers and ours give is the same, whatever was done to them before and however long."""

from __future__ import annotations

import pytest

from tests.histories.running import run_history
from tests.histories.short import BUFFERS, kernel_histories, short_histories, visits_of
from tests.histories.visits import Visits

FEWEST_VISITS = 10


@pytest.mark.parametrize("buffer", BUFFERS)
def test_long_histories(buffer: str) -> None:
    visits = Visits()
    for name in short_histories(buffer):
        run_history(name, visits)
    missed = {kind: visits[kind] for kind in sorted(visits_of(buffer)) if visits[kind] < FEWEST_VISITS}
    assert not missed, f"Histories were too tame to prove something: {missed} of {dict(visits)}."


@pytest.mark.parametrize("name", kernel_histories(), ids=str)
def test_long_histories_by_kernel(name) -> None:
    run_history(name, path="kernels")
