"""``bench`` on real environments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stable_baselines3 import DQN

from tests.cli.commands import error_of, run, run_program

pytest.importorskip("matplotlib")


def test_a_vector_environment_played_by_a_model(tmp_path: Path) -> None:
    DQN("MlpPolicy", "CartPole-v1", buffer_size=10, policy_kwargs={"net_arch": [8]}, device="cpu").save(
        tmp_path / "m.zip"
    )
    finished = run(
        *("bench", "--env", "CartPole-v1", "--steps", 60, "--n-envs", 2, "--repeats", 3, "--batch-size", 16),
        *("--methods", "auto", "--policy", "m.zip", "--json", "r.json", "--html", "r.html"),
        cwd=tmp_path,
    )
    assert finished.returncode == 0, finished.stderr
    assert "playing CartPole-v1: 100%" in finished.stderr
    assert "60 steps of 2 environments, played by m.zip, observations float32 (4,)" in finished.stdout
    assert "sample(16), µs" in finished.stdout
    assert "extrapolated to 100,000" in finished.stdout
    assert "\nRecommended: " in finished.stdout  # which buffer depends on the times
    assert "Results written to r.json, r.html" in finished.stdout

    data = json.loads((tmp_path / "r.json").read_text())
    assert [row["method"] for row in data["results"]] == ["SB3", "auto"]
    assert data["results"][0]["bytes_per_transition"] >= 2 * 4 * 4  # two observations of four float32
    assert all(row["add_microseconds"] > 0 and row["sample_microseconds"] > 0 for row in data["results"])
    assert "cores" in data["machine"]
    assert "<h1>Replay buffers for CartPole-v1</h1>" in (tmp_path / "r.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.zip", "r.html", "r.json"]


def test_a_dict_environment_gets_the_class_for_dicts(tmp_path: Path) -> None:
    pytest.importorskip("vizdoom")
    finished = run(
        *("bench", "--env", "vizdoom.gymnasium_wrapper:VizdoomBasic-v1", "--steps", 48, "--n-envs", 1),
        *("--buffer-size", 40, "--methods", "gzip1", "--repeats", 2, "--batch-size", 4),
        cwd=tmp_path,
    )
    assert finished.returncode == 0, finished.stderr
    assert "screen: uint8 (3, 240, 320)" in finished.stdout
    assert "with 40 transitions." in finished.stdout  # measured at their full size, so not extrapolated
    assert "replay_buffer_class=CompressedDictReplayBuffer" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--env", "CartPol-v1"], "There is no environment 'CartPol-v1': Environment `CartPol` doesn't exist. Did you"),
        (
            ["--env", "CartPole-v1", "--algo", "sac"],
            "SAC does not support Discrete actions. Use --algo dqn, ppo or a2c.",
        ),
        (["--env", "Mygame-v0"], "add the module: --env mygame:Mygame-v0"),
    ],
    ids=["unknown environment", "another algorithm", "a module of the user"],
)
def test_what_cannot_work_is_said_in_one_line(arguments: list[str], part: str, tmp_path: Path) -> None:
    (tmp_path / "mygame.py").write_text("import gymnasium\n")
    assert part in error_of(run("bench", *arguments, cwd=tmp_path))


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (["--env", "PongNoFrameskip-v4"], "ale_py", "atari"),
        (["--env", "CartPole-v1", "--html", "x.html"], "matplotlib", "plots"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(arguments: list[str], package: str, extra: str) -> None:
    error = error_of(run_program("bench", *arguments, without=(package,)))
    assert f'pip install "sb3-extra-buffers[{extra}]"' in error


def test_rollouts_of_a_wrapped_environment(tmp_path: Path) -> None:
    finished = run(
        *("bench", "--env", "CartPole-v1", "--steps", 100, "--n-envs", 2, "--repeats", 30, "--methods", "auto,none"),
        *("--algo", "ppo", "--buffer-size", 64, "--json", "r.json", "--env-kwargs", '{"sutton_barto_reward": true}'),
        *("--wrapper", "gymnasium.wrappers:FlattenObservation"),
        cwd=tmp_path,
    )
    assert finished.returncode == 0, finished.stderr
    assert "SB3 RolloutBuffer" in finished.stdout
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["buffer"] == "RolloutBuffer"
    assert [row["transitions"] for row in data["results"]] == [64] * 3
    assert all(row["add_microseconds"] > 0 and row["sample_microseconds"] > 0 for row in data["results"])
