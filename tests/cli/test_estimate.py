from __future__ import annotations

import json

import pytest

from tests.cli.commands import run

pytest.importorskip("ale_py")
pytest.importorskip("cv2")


def test_a_buffer_that_fits_only_when_it_is_compressed() -> None:
    million = json.loads(
        run(
            *("estimate", "--env", "PongNoFrameskip-v4", "--n-envs", 1, "--steps", 150),
            *("--buffer-size", 10**9, "--method", "gzip1", "--json"),
        ).stdout
    )
    assert million["sb3_bytes"] == 10**9 * (2 * 4 * 84 * 84 + 8 + 12)
    assert million["available_bytes"] < million["sb3_bytes"]
    assert million["bytes"] < million["sb3_bytes"] / 10
