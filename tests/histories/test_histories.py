"""Our buffers return the same as SB3's after long random histories."""

from __future__ import annotations

import pytest

from tests.histories.plans import Name
from tests.histories.running import run_history
from tests.histories.short import BUFFERS, kernel_histories, segment_histories, short_histories, visits_of
from tests.histories.visits import CODEC_CHANGES, DICTIONARIES, KINDS, REFERENCES, RENUMBERINGS, Visits

FEWEST_VISITS = dict.fromkeys(KINDS, 10) | {CODEC_CHANGES: 1, DICTIONARIES: 4, REFERENCES: 4, RENUMBERINGS: 4}
"""For each class. The last test makes sure that all classes together require each kind at least ten times."""


@pytest.mark.parametrize("buffer", BUFFERS)
def test_long_histories(buffer: str) -> None:
    visits = Visits()
    for name in short_histories(buffer):
        run_history(name, visits)
    missed = {kind: visits[kind] for kind in sorted(visits_of(buffer)) if visits[kind] < FEWEST_VISITS[kind]}
    assert not missed, f"These rare events happened too rarely to be tested: {missed} of {dict(visits)}."


@pytest.mark.parametrize("name", kernel_histories(), ids=str)
def test_long_histories_by_kernel(name: Name) -> None:
    run_history(name, path="kernels")


@pytest.mark.parametrize(
    "buffer", [buffer for buffer in BUFFERS if not buffer.startswith("Gpu") and "Sequence" not in buffer]
)
def test_long_histories_by_segments(buffer: str) -> None:
    for name in segment_histories(buffer):
        run_history(name, path="segments")


def test_everything_is_visited_ten_times() -> None:
    for kind in KINDS:
        assert FEWEST_VISITS[kind] * sum(kind in visits_of(buffer) for buffer in BUFFERS) >= 10
