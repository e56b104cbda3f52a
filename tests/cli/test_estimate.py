from __future__ import annotations

import json

import pytest

from tests.cli.commands import run

pytest.importorskip("ale_py")
pytest.importorskip("cv2")


def test_sb3_is_computed_and_ours_measured() -> None:
    found = json.loads(
        run(
            *("estimate", "--env", "PongNoFrameskip-v4", "--n-envs", 1, "--steps", 150),
            *("--buffer-size", 10**6, "--method", "gzip1", "--json"),
        ).stdout
    )
    assert found["sb3_bytes"] == 10**6 * (2 * 4 * 84 * 84 + 8 + 12)
    assert found["available_bytes"] > 0
    assert found["bytes"] < found["sb3_bytes"] / 10
