from __future__ import annotations

import pytest

from tests.cli.commands import error_of, run

pytest.importorskip("ale_py")
pytest.importorskip("cv2")


def test_both_runs_end_with_the_same_network() -> None:
    finished = run("demo", "--env", "PongNoFrameskip-v4", "--steps", 1100, "--buffer-size", 1200)
    assert finished.returncode == 0, finished.stderr
    assert "Trained networks: bit-identical" in finished.stdout
    assert "CompressedReplayBuffer.memory_usage():" in finished.stdout


def test_it_is_for_atari() -> None:
    assert "'CartPole-v1' is not an Atari game" in error_of(run("demo", "--env", "CartPole-v1"))
