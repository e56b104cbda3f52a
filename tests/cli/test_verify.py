"""``verify``: says "identical" where it is, and finds a fault wherever one is planted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.errors import MismatchError
from sb3_extra_buffers.measure.buffers import Task
from sb3_extra_buffers.measure.transitions import Transition
from sb3_extra_buffers.measure.verification import Verification, first_difference
from tests.cli.commands import COMMAND, error_of, run
from tests.transitions import play

IMAGES = spaces.Box(0, 255, (4, 8, 9), np.uint8)
DICT = spaces.Dict({"image": IMAGES, "vector": spaces.Box(-np.inf, np.inf, (3,), np.float32)})
ACTIONS = spaces.Discrete(3)


def steps(space: spaces.Space, count: int) -> list[Transition]:
    transitions = play(space, 2, action_space=ACTIONS)
    return [Transition(*next(transitions)) for _ in range(count)]


class TestCommand:
    def test_an_environment_without_faults(self) -> None:
        finished = run("verify", "--env", "CartPole-v1", "--steps", 600, "--n-envs", 2)
        assert finished.returncode == 0, finished.stderr
        assert "playing CartPole-v1: 100%" in finished.stderr
        assert "CartPole-v1: 600 steps of 2 environments, observations float32 (4,)" in finished.stdout
        assert re.search(r"replay buffer of 300 transitions, .*: filled 4 times, 201 batches compared", finished.stdout)
        assert re.search(r"rollout buffer of 10 steps, .*: filled 60 times, 120 batches compared", finished.stdout)
        last = finished.stdout.splitlines()[-1]
        assert re.fullmatch(r"[\d,]+ observations compared, all identical\.", last)
        # 300 transitions stored and compared five times, 201 batches of 64, and two epochs of each rollout.
        assert int(last.split()[0].replace(",", "")) == 2 * (5 * 300 + 201 * 64) + 2 * 600 * 2

    @pytest.mark.parametrize(
        ("env_id", "package"),
        [("ALE/Pong-v5", "ale_py"), ("vizdoom.gymnasium_wrapper:VizdoomBasic-v1", "vizdoom")],
    )
    def test_games(self, env_id: str, package: str) -> None:
        pytest.importorskip(package)
        finished = run("verify", "--env", env_id, "--steps", 40, "--n-envs", 1, "--method", "zstd-3")
        assert finished.returncode == 0, finished.stderr
        assert "filled 4 times" in finished.stdout
        assert finished.stdout.endswith("observations compared, all identical.\n")

    def test_an_environment_that_fails(self) -> None:
        finished = run("verify", "--env", "tests.measure.test_environments:Failing-v0", "--steps", 10)
        assert finished.returncode == 1
        assert "Traceback" not in finished.stderr
        said = finished.stderr.splitlines()[-1]
        assert "Failing-v0' raised RuntimeError: the simulator has gone (in " in said
        assert "test_environments.py, line" in said

    @pytest.mark.parametrize("algo", ["dqn", "ppo"])
    def test_one_of_the_two_buffers(self, algo: str) -> None:
        printed = run("verify", "--env", "CartPole-v1", "--steps", 20, "--algo", algo, "--buffer-size", 400).stdout
        assert ("replay buffer of 400 transitions" in printed) == (algo == "dqn")
        assert ("rollout buffer of 100 steps" in printed) == (algo == "ppo")
        assert "A buffer never became full" in printed

    @pytest.mark.parametrize(
        ("arguments", "code", "part"),
        [
            (["--env", "CartPol-v1"], 1, "There is no environment 'CartPol-v1'"),
            (["--env", "CartPole-v1", "--method", "zip"], 1, "'zip'"),
            (["--env", "CartPole-v1", "--algo", "rainbow"], 2, "'rainbow' is not one of 'dqn', 'sac'"),
            (["--env", "CartPole-v1", "--buffer-size", "0"], 2, "'--buffer-size'"),
            ([], 2, "Missing option '--env'"),
        ],
    )
    def test_bad_input_is_one_line(self, arguments: list[str], code: int, part: str) -> None:
        assert part in error_of(run("verify", *arguments), code)

    def test_a_buffer_that_gives_other_values_is_found_out(self, tmp_path: Path) -> None:
        # The user's own module stands for a fault of ours.
        (tmp_path / "faulty.py").write_text(
            "import gymnasium as gym\n"
            "from sb3_extra_buffers.compressed import CompressedRolloutBuffer as Buffer\n"
            "get_samples = Buffer._get_samples\n"
            "def wrong(self, indices, env=None):\n"
            "    batch = get_samples(self, indices, env)\n"
            "    batch.observations[indices == 7, 1] += 1\n"
            "    return batch\n"
            "Buffer._get_samples = wrong\n"
            "gym.register('Faulty-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
        )
        finished = run("verify", "--env", "faulty:Faulty-v0", "--steps", 100, "--n-envs", 2, cwd=tmp_path)
        assert finished.returncode == 1
        assert finished.stdout == ""
        error = finished.stderr.splitlines()[-1]
        assert error.startswith(
            "Error: observations differs from SB3's at slot 2 of environment 1, added at step 3 of 5: value 1 of 4 is "
        )

    @pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
    def test_ctrl_c(self) -> None:
        process = subprocess.Popen(
            [*COMMAND, "verify", "--env", "CartPole-v1", "--steps", "10000000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert process.stderr is not None
        said = ""
        while "/10000000 [00:0" not in said:
            said += process.stderr.read(1)
        os.killpg(process.pid, signal.SIGINT)
        printed, rest = process.communicate(timeout=60)
        assert (process.returncode, printed) == (130, "")
        assert rest.endswith("Interrupted.\n")


def replay(space: spaces.Space) -> Verification:
    return Verification(Task("Replay", space, ACTIONS, 2), "auto", size=60, steps=100, seed=1)  # 30 slots


def rollout(space: spaces.Space) -> Verification:
    return Verification(Task("Rollout", space, ACTIONS, 2), "auto", size=80, steps=170, seed=1)  # 40 slots


class TestReplay:
    @pytest.mark.parametrize("space", [IMAGES, DICT], ids=["images", "Dict"])
    def test_nothing_to_find(self, space: spaces.Space) -> None:
        verification = replay(space)
        for step in steps(space, 100):
            verification.add(step)
        assert verification.finish().fills == 3

    @pytest.mark.parametrize("field", ["actions", "rewards", "dones", "timeouts"])
    def test_a_wrong_field(self, field: str) -> None:
        verification = replay(DICT)
        for step in steps(DICT, 75):
            verification.add(step)
        array = getattr(verification.ours, field)
        array[20, 1] = 1 - array[20, 1]
        with pytest.raises(
            MismatchError, match=rf"^{field} differs .* slot 20 of environment 1, added at step 51 of 75"
        ):
            verification.finish()

    @pytest.mark.parametrize("name", ["observations", "next_observations"])
    def test_a_wrong_observation(self, name: str) -> None:
        verification = replay(DICT)
        for step in steps(DICT, 75):
            verification.add(step)
        array = getattr(verification.ours, name)["image"]
        image = array[3, 0]
        image[2, 1, 4] += 1
        array[3, 0] = image
        place = 2 * 72 + 1 * 9 + 4
        where = "slot 3 of environment 0, added at step 64 of 75"
        with pytest.raises(MismatchError, match=rf"^{name}\['image'\] differs .* {where}: value {place} of 288 is"):
            verification.finish()

    def test_a_batch_that_differs_from_what_is_stored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        verification = replay(IMAGES)
        samples_at = verification.ours._samples_at

        def wrong(*arguments: Any) -> Any:
            batch = samples_at(*arguments)
            batch.rewards[5] += 1
            return batch

        monkeypatch.setattr(verification.ours, "_samples_at", wrong)
        with pytest.raises(
            MismatchError, match=r"^rewards differs .* row 5 of a batch drawn after step 1: value 0 of 1"
        ):
            verification.add(steps(IMAGES, 1)[0])

    def test_what_check_finds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        verification = replay(IMAGES)

        def check() -> None:
            raise MismatchError("a count is wrong")

        monkeypatch.setattr(verification.ours, "check", check, raising=False)
        verification.add(steps(IMAGES, 1)[0])
        with pytest.raises(MismatchError, match="a count is wrong"):
            verification.finish()


class TestRollouts:
    @pytest.mark.parametrize("space", [IMAGES, DICT], ids=["images", "Dict"])
    def test_nothing_to_find(self, space: spaces.Space) -> None:
        verification = rollout(space)
        for step in steps(space, 170):
            verification.add(step)
        tally = verification.finish()
        keys = len(space) if isinstance(space, spaces.Dict) else 1
        assert (tally.fills, tally.batches, tally.observations) == (4, 4 * 2 * 2, 4 * 2 * 80 * keys)

    @pytest.mark.parametrize("field", ["actions", "log_probs", "observations"])
    def test_a_wrong_value(self, field: str) -> None:
        verification = rollout(IMAGES)
        *most, last = steps(IMAGES, 80)
        for step in most:
            verification.add(step)
        array = getattr(verification.ours, field)
        array[11, 1] = np.asarray(array[11, 1]) + 1
        name = "old_log_prob" if field == "log_probs" else field
        where = "slot 11 of environment 1, added at step 52 of 80"
        with pytest.raises(MismatchError, match=f"^{name} differs from SB3's at {where}: "):
            verification.add(last)


def test_bits_are_compared_not_values() -> None:
    zeros, ones = np.zeros((3, 2)), np.ones((3, 2))
    nan = np.full((3, 2), np.nan)
    assert first_difference(zeros, -zeros) == 0
    assert first_difference(nan, nan.copy()) is None
    ones[2, 1] = 5
    assert first_difference(np.ones((3, 2)), ones) == 2
    assert first_difference(np.ones((0, 2)), np.ones((0, 2))) is None
    with pytest.raises(MismatchError, match="float32"):
        first_difference(zeros, zeros.astype(np.float32))
