from __future__ import annotations

import json

import pytest

from tests.cli.commands import run

pytest.importorskip("ale_py")
pytest.importorskip("cv2")


def test_a_buffer_that_fits_only_when_it_is_compressed() -> None:
    found = json.loads(
        run(
            *("estimate", "--env", "PongNoFrameskip-v4", "--n-envs", 1, "--steps", 150),
            *("--buffer-size", 10**7, "--method", "gzip1", "--json"),
        ).stdout
    )
    assert found["sb3_bytes"] == 10**7 * (2 * 4 * 84 * 84 + 8 + 12)
    assert found["available_bytes"] < found["sb3_bytes"]
    assert found["bytes"] < found["sb3_bytes"] / 10
