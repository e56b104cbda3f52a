from __future__ import annotations

import pytest

from tests.cli.commands import run_program

pytest.importorskip("ray")


def test_a_learner_and_its_collectors() -> None:
    finished = run_program("cluster-demo", "--env", "CartPole-v1", "--collectors", 2, "--envs", 2, "--steps", 300)
    assert finished.returncode == 0, finished.stderr
    assert "transitions received" in finished.stdout
    assert "updates" in finished.stderr  # the status line


def test_an_environment_that_dqn_is_not_for() -> None:
    finished = run_program("cluster-demo", "--env", "Pendulum-v1")
    assert finished.returncode == 1
    assert "discrete actions" in finished.stderr
