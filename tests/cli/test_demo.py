from __future__ import annotations

import pytest

from tests.cli.commands import run_program

pytest.importorskip("ale_py")
pytest.importorskip("cv2")


def test_both_runs_end_with_the_same_network() -> None:
    finished = run_program(
        *("demo", "--env", "PongNoFrameskip-v4", "--steps", 60, "--buffer-size", 100), encoding="cp1252"
    )
    assert finished.returncode == 0, finished.stderr
    assert "Trained networks: bit-identical" in finished.stdout
    assert "CompressedReplayBuffer.memory_usage():" in finished.stdout
    assert "Peak process memory also includes Python, PyTorch" in finished.stdout
