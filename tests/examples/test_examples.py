"""Every example runs, briefly, and says in the end what it should."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for package in ("ale_py", "cv2", "imageio_ffmpeg", "vizdoom", "psutil"):
    pytest.importorskip(package)

EXAMPLES = Path(__file__).parents[2] / "examples"
ATARI = ("rollout", "rollout_mspacman", "replay")
AGENTS = {
    f"example_{verb}_{name}" for verb in ("train", "eval", "watch") for name in (*ATARI, "gpu_rollout", "gpu_replay")
}
COMMON = ["--n-envs", "1", "--device", "cpu"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Calls an example as its user would, in an empty folder, and returns what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)

    def run_example(name: str, *argv: str) -> str:
        importlib.import_module(name).main([*COMMON, *argv])
        return capsys.readouterr().out

    return run_example


@pytest.mark.parametrize("name", ATARI)
def test_training_evaluating_and_watching(name: str, run: Callable[..., str], tmp_path: Path) -> None:
    methods = {"rollout": "auto", "rollout_mspacman": "rle-jit", "replay": "zstd-3"}
    few = ["--steps", "32", "--compression", methods[name], "--eval-every", "0", "--curve", "curve.csv"]
    if name == "replay":
        few += ["--warm-up", "1", "--buffer-size", "150"]
    printed = run(f"example_train_{name}", *few)
    assert "times smaller" in printed
    assert "saved as models" in printed
    command, headings, *rows = (tmp_path / "curve.csv").read_text().splitlines()
    assert command.startswith("# python ")
    assert headings == "steps,seconds,episodes,mean_return"
    assert len(rows) >= 30

    printed = run(f"example_eval_{name}", "--episodes", "2", "--steps", "40")
    assert "2 episodes, mean return" in printed
    printed = run(f"example_watch_{name}", "--steps", "40")
    assert "1 episode, mean return" in printed
    (video,) = tmp_path.glob("*.mp4")
    assert str(video.name) in printed
    assert video.stat().st_size > 1_000


@pytest.mark.parametrize(("env", "steps", "updates"), [("corridor", 130, 65), ("PongNoFrameskip-v4", 30, 15)])
def test_a_recurrent_agent(env: str, steps: int, updates: int, run: Callable[..., str], tmp_path: Path) -> None:
    printed = run("example_train_recurrent", "--env", env, "--steps", str(steps), "--curve", "curve.csv")
    assert f"{steps} steps and {updates} updates" in printed
    assert "SB3 would take" in printed
    assert (tmp_path / "curve.csv").read_text().startswith("steps,seconds,mean_return")
    assert len((EXAMPLES / "example_train_recurrent.py").read_text().splitlines()) <= 200


def test_a_loop_of_ones_own(run: Callable[..., str]) -> None:
    printed = run("example_train_own_loop", "--steps", "100", "--buffer-size", "1000")
    assert "100 steps in" in printed
    assert "times smaller" in printed


def test_a_missing_model_is_explained(run: Callable[..., str]) -> None:
    with pytest.raises(SystemExit, match="train one with"):
        run("example_watch_rollout")


@pytest.mark.parametrize("name", ["saving", "loading"])
def test_tables_of_memory(name: str, run: Callable[..., str]) -> None:
    printed = run(f"example_eval_memory_{name}", "--steps", "100", "--methods", "zstd-3")
    headings, _, baseline, zstd = [line for line in printed.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in headings.split("|")[1:-1]] == [
        *("Compression", "Observations", "%", "Memory", "Memory %", "Latency (s)")
    ]
    assert "100.0%" in baseline
    assert float(zstd.split("|")[3].strip(" %")) < 50


def test_all_methods_are_in_the_tables(run: Callable[..., str]) -> None:
    saving = importlib.import_module("example_eval_memory_saving")
    registry = importlib.import_module("sb3_extra_buffers.codecs.registry")
    measured = {registry.parse_method(method).name for method in saving.chosen(None)}
    assert measured == {"auto", *registry.available_methods()}


def test_doom(run: Callable[..., str], tmp_path: Path) -> None:
    printed = run(
        "example_vizdoom",
        *("--scenario", "basic", "--observations", "40", "--methods", "auto", "--steps", "16", "--episodes", "1"),
    )
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["RGB", "masks", "masks, auto"]
    assert "10.83 GB" in rows[2]
    assert "3.61 GB" in rows[3]
    assert "PPO on the masks of basic" in printed
    assert (tmp_path / "doom.mp4").stat().st_size > 1_000


@pytest.mark.parametrize("algorithm", ["dqn", "prioritized", "ppo"])
def test_training_with_collectors(algorithm: str, run: Callable[..., str]) -> None:
    few = ["--algo", algorithm, "--env", "CartPole-v1", "--steps", "64", "--buffer-size", "999", "--in-process"]
    printed = run("example_train_distributed", *few)
    assert f"saved as models/{algorithm}_distributed.zip" in printed
    assert "bytes per transition: " in printed
    assert "last" in printed


def test_recipes_for_clusters() -> None:
    """The shell script is valid, and the RayJob has what the one in KubeRay's repository has."""
    script = EXAMPLES / "cluster" / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "#SBATCH --nodes=" in script.read_text()
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((EXAMPLES / "cluster" / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    known = {"entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "runtimeEnvYAML", "rayClusterSpec"}
    assert set(job["spec"]) <= known
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["pip"]
    cluster = job["spec"]["rayClusterSpec"]
    assert set(cluster) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    (workers,) = cluster["workerGroupSpecs"]
    assert set(workers) == {"replicas", "minReplicas", "maxReplicas", "groupName", "rayStartParams", "template"}
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"].removeprefix("rayproject/ray:").startswith(cluster["rayVersion"])
        assert set(container["resources"]) == {"limits", "requests"}
    # Both run the example with arguments that it has.
    for command in (script.read_text(), job["spec"]["entrypoint"]):
        (line,) = (line for line in command.splitlines() if "example_train_distributed.py" in line and "python" in line)
        options = re.findall(r"--[a-z-]+", line)
        assert options
        assert all(
            f'"{option}"' in (EXAMPLES / "example_train_distributed.py").read_text()
            or f'"{option}"' in (EXAMPLES / "common.py").read_text()
            for option in options
        )


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_training_on_the_device(algorithm: str, run: Callable[..., str]) -> None:
    printed = run(
        "example_train_on_device", "--algo", algorithm, "--steps", "32", "--episodes", "1", "--buffer-size", "99"
    )
    assert f"saved as models/{algorithm}_breakout_on_device.zip" in printed
    assert "bricks per game\nafter training" in printed


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("example_*.py")), ids=lambda path: path.stem)
def test_every_example_has_help_and_is_tested(path: Path, run: Callable[..., str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        run(path.stem, "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--steps" in shown
    assert "--seed" in shown
    others = {
        "eval_memory_saving",
        "eval_memory_loading",
        "train_distributed",
        "train_on_device",
        "train_own_loop",
        "train_recurrent",
        "vizdoom",
    }
    assert path.stem in {*AGENTS, *(f"example_{name}" for name in others)}


def test_every_agent_can_be_trained_evaluated_and_watched() -> None:
    assert {path.stem for path in EXAMPLES.glob("example_*.py")} >= AGENTS
