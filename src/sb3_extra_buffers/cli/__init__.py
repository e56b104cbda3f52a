"""The command line, ``sb3-extra-buffers``: a module for each command.

They import what they need when they run, so that ``--help`` and completion answer at once.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

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
    """Experience memory for Stable-Baselines3 that holds observations compressed."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (bench, estimate, verify, methods, inspect, demo):
    app.add_command(command)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and leave: an error is one line, and Ctrl-C is no error."""
    # torch's threads wait in a busy loop unless told not to, which slows everything beside them.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    logging.getLogger("sb3_extra_buffers").addHandler(logging.StreamHandler())
    sys.path.append(str(Path.cwd()))  # for environments of one's own: --env module:name
    for stream in (sys.stdout, sys.stderr):
        _never_fail_to_encode(stream)
    signal.signal(signal.SIGTERM, _end)  # by way of `finally`: temporary files are removed
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


def _never_fail_to_encode(stream: TextIO) -> None:
    """Print ``?`` for what the stream has no letter for, as where Windows writes to a file or a pipe."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


def _end(signal_number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signal_number)
