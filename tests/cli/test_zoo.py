"""``zoo`` where the RL Zoo is not installed. tests/neighbours/test_rl_zoo3.py uses the real one."""

from __future__ import annotations

from tests.cli.commands import error_of, run_program


def test_without_the_zoo_the_error_names_the_extra() -> None:
    message = error_of(run_program("zoo", "train", "--algo", "dqn", "--help", without=("rl_zoo3",)))
    assert "rl_zoo3" in message
    assert 'pip install "sb3-extra-buffers[zoo]"' in message


def test_an_unknown_script_is_wrong_usage() -> None:
    assert "'plot' is not one of 'train', 'enjoy'" in error_of(run_program("zoo", "plot"), code=2)
