from __future__ import annotations

import pytest

from tests.cli.commands import run

pytest.importorskip("ale_py")
pytest.importorskip("cv2")


def test_both_runs_end_with_the_same_network() -> None:
    finished = run("demo", "--env", "PongNoFrameskip-v4", "--steps", 120, "--buffer-size", 150)
    assert finished.returncode == 0, finished.stderr
    assert "Trained networks: bit-identical" in finished.stdout
    assert "CompressedReplayBuffer.memory_usage():" in finished.stdout
    assert "The process needs more than its buffer: Python, PyTorch" in finished.stdout
