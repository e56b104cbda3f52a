"""``inspect``: show what is in a saved buffer."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--no-checksums", is_flag=True, help="Skip the checksums. Checking them reads the whole file.")
def inspect(file: Path, no_checksums: bool) -> None:
    """Show what is in FILE, a saved buffer or the folder of an on-disk buffer.

    The exit code is 1 if it is damaged.
    """
    from sb3_extra_buffers.persistence.inspection import inspect_file

    report = inspect_file(file, verify=not no_checksums)
    click.echo(str(report))
    if report.damaged:
        sys.exit(1)
