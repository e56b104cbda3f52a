from __future__ import annotations

import json

import pytest

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.measure.environments import make_env
from sb3_extra_buffers.measure.transitions import collect
from tests.cli.commands import run


def test_sb3_is_computed_and_ours_measured() -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    found = json.loads(
        run(
            *("estimate", "--env", "PongNoFrameskip-v4", "--n-envs", 1, "--steps", 150),
            *("--buffer-size", 10**6, "--method", "gzip1", "--json"),
        ).stdout
    )
    assert found["sb3_bytes"] == 10**6 * (2 * 4 * 84 * 84 + 8 + 12)
    assert found["available_bytes"] > 0
    assert found["bytes"] < found["sb3_bytes"] / 10
    assert found["settled"]


def test_a_run_that_is_too_short_for_auto_says_so() -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    finished = run("estimate", "--env", "PongNoFrameskip-v4", "--n-envs", 1, "--steps", 100)
    assert "auto may still change its method: use --steps 5738 or more" in finished.stdout


@pytest.mark.parametrize("env_id", ["CartPole-v1", "PongNoFrameskip-v4"])
def test_it_agrees_with_memory_usage_of_a_full_buffer(env_id: str) -> None:
    if "Pong" in env_id:
        pytest.importorskip("ale_py")
        pytest.importorskip("cv2")
    found = json.loads(
        run("estimate", "--env", env_id, "--n-envs", 2, "--steps", 600, "--buffer-size", 4_000, "--json").stdout
    )
    env = make_env(env_id, 2, seed=0)
    buffer = CompressedReplayBuffer(4_000, env.observation_space, env.action_space, "cpu", 2)
    for transition in collect(env, 2_000):
        buffer.add(*transition)
    assert buffer.full
    usage = buffer.memory_usage()
    assert found["sb3_bytes"] == usage.raw_equivalent
    assert found["bytes"] == pytest.approx(usage.total, rel=0.15)
