"""The command line, ``sb3-extra-buffers``: the entry point, and the commands ``methods`` and ``inspect``.

Commands import torch and NumPy when they run, so that ``--help`` and completion respond at once.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import click

from sb3_extra_buffers import __version__
from sb3_extra_buffers.cli.bench import bench
from sb3_extra_buffers.cli.cluster_demo import cluster_demo
from sb3_extra_buffers.cli.common import table
from sb3_extra_buffers.cli.demo import demo
from sb3_extra_buffers.cli.estimate import estimate
from sb3_extra_buffers.cli.verify import verify
from sb3_extra_buffers.cli.zoo import zoo
from sb3_extra_buffers.errors import ExtraBuffersError

PROGRAM = "sb3-extra-buffers"
INTERRUPTED = 128 + signal.SIGINT


@click.group(
    name=PROGRAM,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    epilog=f"Run '{PROGRAM} COMMAND --help' for the options of a command.",
)
@click.version_option(__version__, prog_name=PROGRAM)
@click.pass_context
def app(context: click.Context) -> None:
    """Compressed replay and rollout buffers for Stable-Baselines3."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@app.command()
def methods() -> None:
    """List the compression methods and their options."""
    from sb3_extra_buffers.codecs import availability
    from sb3_extra_buffers.codecs.registry import METHODS, available_methods, codec_class, level_ranges, option_names

    installed = available_methods()
    rows = []
    for name in METHODS:
        levels = codec_class(name).levels
        options = [option for option in option_names(name) if option != "compresslevel"]
        is_installed = "yes" if name in installed else "no"
        rows.append((name, is_installed, level_ranges(levels) if levels else "-", ", ".join(options) or "-"))
    click.echo(table(("method", "installed", "levels", "options"), rows, left=4))
    click.echo('\nThe default, "auto", tries the installed methods on the first observations and picks one.')
    if not availability.has_numba():
        click.echo('"delta" is many times faster with numba: pip install "sb3-extra-buffers[numba]"')
    for name, entry in METHODS.items():
        if name not in installed:
            install = f'pip install "sb3-extra-buffers[{entry.extra}]"'
            click.echo(f'"{name}" needs a package that is not installed: {install}')


@app.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--no-checksums", is_flag=True, help="Do not verify checksums. Verifying reads the whole file.")
def inspect(file: Path, no_checksums: bool) -> None:
    """Show what is in a saved buffer.

    FILE is a saved buffer or the folder of an on-disk buffer. The exit code is 1 if FILE is damaged.
    """
    from sb3_extra_buffers.persistence.inspection import inspect_file

    report = inspect_file(file, verify=not no_checksums)
    click.echo(str(report))
    if report.damaged:
        sys.exit(1)


for command in (bench, estimate, verify, demo, cluster_demo, zoo):
    app.add_command(command)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit. Errors are printed in one line, without a traceback."""
    if sys.stderr is None:  # the shell's 2>&-, or Windows without a console: progress bars need it
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # as long as the process lives
    logging.getLogger("sb3_extra_buffers").addHandler(logging.StreamHandler())
    sys.path.append(str(Path.cwd()))  # for environments in the user's folder: --env module:name
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # some Windows encodings lack characters: print "?" for these
    # Unlike the default, this runs `finally` blocks, which remove temporary files.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
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
