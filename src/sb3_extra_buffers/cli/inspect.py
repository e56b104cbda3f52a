"""``inspect``: show what is in a saved buffer."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sb3_extra_buffers.cli.common import output_file


@click.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@output_file("--png", "Also write a contact sheet of its frames to this file.", ".png")
@click.option("--frames", type=click.IntRange(1), default=40, show_default=True, help="Frames on the contact sheet.")
@click.option("--key", help="For Dict observations, the key to show. [default: the first with images]")
@click.option("--no-checksums", is_flag=True, help="Skip the checksums. Checking them reads the whole file.")
def inspect(file: Path, png: Path | None, frames: int, key: str | None, no_checksums: bool) -> None:
    """Show what is in FILE, a saved buffer or the folder of an on-disk buffer.

    The exit code is 1 if it is damaged.
    """
    from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
    from sb3_extra_buffers.persistence.inspection import contact_sheet, inspect_file

    report = inspect_file(file, verify=not no_checksums)
    click.echo(str(report))
    if png is not None:
        contact_sheet(BaseCompressedBuffer.load(file, "cpu", mmap=True), png, frames, key)
        click.echo(f"\nFrames: {png}")
    if report.damaged:
        sys.exit(1)
