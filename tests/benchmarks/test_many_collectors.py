"""The simulation agrees with what can be computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.studies.many_collectors import SEGMENT, SYNC_EVERY, Measured, Simulation

MEASURED = Measured(
    bytes_per_transition=300, ingest=0.001, weights=1_000_000, publish=0.005, call=0.0002, poll=0.0005, collect=0.2,
    gradient=0.05,
)  # fmt: skip


def simulated(n: int, gradient: float, transitions: float) -> Simulation:
    simulation = Simulation(MEASURED, n, gradient, transitions)
    simulation.run(30.0)
    return simulation


@pytest.mark.parametrize("n", [1, 20])
def test_collectors_are_the_limit(n: int) -> None:
    simulation = simulated(n, 0.0, SEGMENT)
    assert simulation.n_segments / simulation.now == pytest.approx(n / 0.2, rel=0.05)


def test_taking_in_is_the_limit() -> None:
    simulation = simulated(1_000, 0.0, SEGMENT)
    assert simulation.n_segments / simulation.now == pytest.approx(1 / 0.0012, rel=0.15)
    assert simulation.waited < 0.1 * simulation.now


@pytest.mark.parametrize("n", [1, 20, 1_000])
def test_training_is_the_limit_and_weights_stay_new(n: int) -> None:
    simulation = simulated(n, 0.05, 4.0)
    assert simulation.updates / simulation.now == pytest.approx(1 / 0.05, rel=0.02)
    assert np.mean(simulation.behind) < SYNC_EVERY
    assert max(simulation.behind) < 3 * SYNC_EVERY  # of 30 seconds with 600 gradient steps
