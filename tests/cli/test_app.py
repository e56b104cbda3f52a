"""What all commands have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sb3_extra_buffers import __version__
from sb3_extra_buffers.cli import app
from tests.cli.commands import COMMAND, error_of, run


def test_version() -> None:
    assert run("--version").stdout == f"sb3-extra-buffers, version {__version__}\n"


def test_the_installed_script_is_the_same_program() -> None:
    script = Path(sys.executable).with_name("sb3-extra-buffers")
    if not script.exists():
        pytest.skip("the package is not installed, only importable")
    help_text = subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout
    assert help_text == run("--help").stdout == run().stdout


def test_help_of_every_command_is_there_without_importing_torch() -> None:
    calls = "; ".join(f"app.main([{name!r}, '--help'], standalone_mode=False)" for name in app.commands)
    check = "assert not {'torch', 'numpy'} & set(sys.modules)"
    code = f"import sys; from sb3_extra_buffers.cli import app; {calls}; {check}"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.count("Show this message and exit.") == len(app.commands)


def test_completion_for_shells_works() -> None:
    environment = os.environ | {"_SB3_EXTRA_BUFFERS_COMPLETE": "bash_source"}
    printed = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, check=True).stdout
    assert "complete -o nosort" in printed


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["compress"], "No such command 'compress'. Try 'sb3-extra-buffers --help'."),
        (["bench"], "Missing option '--env'. Try 'sb3-extra-buffers bench --help'."),
        (["estimate", "--env", "CartPole-v1", "--steps", "0"], "Invalid value for '--steps': 0"),
        (
            ["bench", "--env", "CartPole-v1", "--html", "no/such/report.html"],
            "There is no folder 'no/such'. Create it first.",
        ),
        (["bench", "--env", "CartPole-v1", "--html", "x.jpeg"], "'x.jpeg' does not end with .html."),
        (["bench", "--env", "CartPole-v1", "--algo", "dqm"], "'dqm' is not one of 'dqn', 'sac', 'td3', 'ppo', 'a2c'"),
        (["bench", "--env", "CartPole-v1", "--env-kwargs", "[1]"], "'[1]' is not a JSON object"),
        (["bench", "--env", "CartPole-v1", "--policy", "no.zip"], "File 'no.zip' does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], part: str) -> None:
    assert part in error_of(run(*arguments), code=2)
