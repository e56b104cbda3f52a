"""The real RL Zoo: train, resume and enjoy as docs/rl-zoo.md says, and our patch for it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch as th

rl_zoo3 = pytest.importorskip("rl_zoo3", reason="make test-rl_zoo3 installs the RL Zoo into an environment of its own")

from stable_baselines3 import DQN, PPO  # noqa: E402
from stable_baselines3.common.buffers import ReplayBuffer  # noqa: E402

from sb3_extra_buffers import CompressedReplayBuffer, CompressedRolloutBuffer  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/rl-zoo.md").read_text()
FILES = re.findall(r"`(\w+\.yml)`:\n\n```yaml\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
OURS = "sb3-extra-buffers zoo train"
THEIRS = "python -m rl_zoo3.train"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the hyperparameter files of the page, for shorter training."""
    for name, text in FILES:
        short = text.replace("n_timesteps: 50000", "n_timesteps: 400").replace("_starts: 1000", "_starts: 100")
        (tmp_path / name).write_text(short)
        without_buffers = re.sub(r"^  (re|ro)\w+_buffer_\w+:.*\n(    .*\n)*", "", short, flags=re.MULTILINE)
        (tmp_path / f"plain_{name}").write_text(without_buffers)
    return tmp_path


def run(command: str, folder: Path, *, succeeds: bool = True, path: Path | None = None) -> str:
    """Run a command of the page, by the Python of these tests, and return what it prints."""
    program, *arguments = shlex.split(command)
    own = {"python": [sys.executable], "sb3-extra-buffers": [sys.executable, "-m", "sb3_extra_buffers"]}
    finished = subprocess.run(
        [*own[program], *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | ({} if path is None else {"PYTHONPATH": str(path)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert (finished.returncode == 0) == succeeds, finished.stdout
    return finished.stdout


def assert_same_weights(first: Any, second: Any) -> None:
    ours, theirs = first.policy.state_dict(), second.policy.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(th.equal(ours[name], theirs[name]) for name in ours)


def test_train_resume_and_enjoy_with_a_replay_buffer(folder: Path) -> None:
    options = "--algo dqn --env CartPole-v1 --seed 1 --save-replay-buffer"
    for log, command in ("ours", f"{OURS} -conf dqn.yml"), ("theirs", f"{THEIRS} -conf plain_dqn.yml"):
        run(f"{command} {options} -f {log}", folder)
        run(f"{command} {options} -f {log} -i {log}/dqn/CartPole-v1_1/CartPole-v1.zip", folder)
    for run_id, n_transitions in (1, 400), (2, 800):  # the second has loaded the buffer of the first
        ours, theirs = (
            DQN.load(folder / f"{log}/dqn/CartPole-v1_{run_id}/CartPole-v1.zip") for log in ("ours", "theirs")
        )
        assert_same_weights(ours, theirs)
        assert ours.replay_buffer_class is CompressedReplayBuffer
        assert ours.replay_buffer_kwargs == {"compression_method": "zstd-5"}
        ours.load_replay_buffer(folder / f"ours/dqn/CartPole-v1_{run_id}/replay_buffer.pkl")
        assert type(ours.replay_buffer) is CompressedReplayBuffer
        assert ours.replay_buffer.size() == n_transitions
        theirs.load_replay_buffer(folder / f"theirs/dqn/CartPole-v1_{run_id}/replay_buffer.pkl")
        assert type(theirs.replay_buffer) is ReplayBuffer
        assert (
            ours.replay_buffer.observations[:n_transitions] == theirs.replay_buffer.observations[:n_transitions]
        ).all()
    enjoyed = [
        run(f"{program} --algo dqn --env CartPole-v1 -f {log} --no-render -n 50", folder).partition("Episode Reward")
        for program, log in (("sb3-extra-buffers zoo enjoy", "ours"), ("python -m rl_zoo3.enjoy", "theirs"))
    ]
    assert "Mean reward" in enjoyed[0][2]
    assert enjoyed[0][2] == enjoyed[1][2]


def test_train_and_resume_with_a_rollout_buffer(folder: Path) -> None:
    options = "--algo ppo --env CartPole-v1 --seed 1"
    for log, command in ("ours", f"{OURS} -conf ppo.yml"), ("theirs", f"{THEIRS} -conf plain_ppo.yml"):
        run(f"{command} {options} -f {log}", folder)
        run(f"{command} {options} -f {log} -i {log}/ppo/CartPole-v1_1/CartPole-v1.zip", folder)
    for run_id in 1, 2:
        ours, theirs = (
            PPO.load(folder / f"{log}/ppo/CartPole-v1_{run_id}/CartPole-v1.zip") for log in ("ours", "theirs")
        )
        assert_same_weights(ours, theirs)
        assert type(ours.rollout_buffer) is CompressedRolloutBuffer
        assert ours.rollout_buffer_kwargs == {"compression_method": "zstd-5"}


def test_the_commands_of_the_page_run(folder: Path) -> None:
    commands = [command for command in COMMANDS if not command.startswith("pip install")]
    assert len(commands) == 6
    for command in commands:
        run(command + (" -n 300" if " -params " in command else ""), folder)
    used = DQN.load(folder / "logs/dqn/CartPole-v1_2/CartPole-v1.zip")
    assert used.replay_buffer_class is CompressedReplayBuffer  # by -params, with the Zoo's own hyperparameters


def test_the_script_of_the_page_runs(folder: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (folder / "train.py").write_text(script)
    (folder / "lstm.yml").write_text(
        "CartPole-v1: {n_timesteps: 64, policy: MlpLstmPolicy, n_steps: 32, batch_size: 32}"
    )
    run("python train.py --algo ppo_lstm --env CartPole-v1 -conf lstm.yml", folder)
    (folder / "logs/ppo_lstm/CartPole-v1_1/CartPole-v1.zip").stat()
    run("python train.py --algo ppo --env CartPole-v1 -conf ppo.yml", folder)
    assert type(PPO.load(folder / "logs/ppo/CartPole-v1_1/CartPole-v1.zip").rollout_buffer) is CompressedRolloutBuffer


def test_a_misspelt_class_is_an_error_of_one_line(folder: Path) -> None:
    name = "sb3_extra_buffers.CompressedReplyBuffer"
    printed = run(
        f"{OURS} --env CartPole-v1 --algo dqn -params replay_buffer_class:\"'{name}'\"", folder, succeeds=False
    )
    assert printed.splitlines()[-1].startswith(f"Error: replay_buffer_class: {name!r} cannot be imported")


def test_the_zoo_needs_the_patch_and_works_with_it(folder: Path) -> None:
    command = f"{THEIRS} --algo dqn --env CartPole-v1 -conf dqn.yml"
    assert "NameError: name 'sb3_extra_buffers' is not defined" in run(command, folder, succeeds=False)
    shutil.copytree(Path(rl_zoo3.__file__).parent, folder / "patched/rl_zoo3")
    subprocess.run(["git", "apply", ROOT / "contrib/rl_zoo3.patch"], cwd=folder / "patched", check=True)
    run(command, folder, path=folder / "patched")
    assert DQN.load(folder / "logs/dqn/CartPole-v1_1/CartPole-v1.zip").replay_buffer_class is CompressedReplayBuffer
    run(f"{THEIRS} --algo ppo --env CartPole-v1 -conf ppo.yml", folder, path=folder / "patched")
    ppo = PPO.load(folder / "logs/ppo/CartPole-v1_1/CartPole-v1.zip")
    assert type(ppo.rollout_buffer) is CompressedRolloutBuffer
    assert ppo.rollout_buffer_kwargs == {"compression_method": "zstd-5"}
