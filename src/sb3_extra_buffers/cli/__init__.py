"""The command line, ``sb3-extra-buffers``: one module for each command.

Commands import what they need when they run, so that ``--help`` and completion answer at once.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from sb3_extra_buffers import __version__
from sb3_extra_buffers.cli.bench import bench
from sb3_extra_buffers.cli.demo import demo
from sb3_extra_buffers.cli.estimate import estimate
from sb3_extra_buffers.cli.inspect import inspect
from sb3_extra_buffers.cli.methods import methods
from sb3_extra_buffers.cli.verify import verify
from sb3_extra_buffers.errors import ExtraBuffersError

PROGRAM = "sb3-extra-buffers"
INTERRUPTED = 128 + signal.SIGINT


@click.group(
    name=PROGRAM,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    epilog="Each command has --help.",
)
@click.version_option(__version__, prog_name=PROGRAM)
@click.pass_context
def app(context: click.Context) -> None:
    """Compressed replay and rollout buffers for Stable-Baselines3."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (bench, estimate, verify, methods, inspect, demo):
    app.add_command(command)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit. An error is one line, without a traceback."""
    # By default torch's threads wait in a busy loop, which slows down other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    logging.getLogger("sb3_extra_buffers").addHandler(logging.StreamHandler())
    sys.path.append(str(Path.cwd()))  # for the user's own environments: --env module:name
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # print "?" if the encoding lacks a letter, as some do on Windows
    signal.signal(signal.SIGTERM, _exit)  # runs `finally` blocks, so that temporary files are removed
    try:
        app.main(arguments, prog_name=PROGRAM, standalone_mode=False)
    except click.Abort:
        click.echo("Interrupted.", err=True)
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = "" if context is None else f" Try '{context.command_path} --help'."
        click.echo(f"Error: {error.format_message()}{hint}", err=True)
        sys.exit(error.exit_code)
    except (ExtraBuffersError, OSError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    sys.exit(0)


def _exit(signal_number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signal_number)
