"""``methods``: which compression methods are installed, and how to install the rest."""

from __future__ import annotations

import click

from sb3_extra_buffers.cli.common import table


@click.command()
def methods() -> None:
    """List the compression methods, and how to install missing ones."""
    from sb3_extra_buffers.codecs import availability
    from sb3_extra_buffers.codecs.registry import METHODS, available_methods, codec_class, level_ranges, option_names

    installed = available_methods()
    rows = []
    for name in METHODS:
        levels = codec_class(name).levels
        options = [option for option in option_names(name) if option != "compresslevel"]
        is_there = "yes" if name in installed else "no"
        rows.append((name, is_there, level_ranges(levels) if levels else "-", ", ".join(options) or "-"))
    click.echo(table(("method", "installed", "levels", "options"), rows, left=4))
    click.echo('\nThe default, "auto", picks one of the installed methods from the first observations that it sees.')
    if not availability.has_numba():
        click.echo('"delta" is many times faster with numba: pip install "sb3-extra-buffers[numba]"')
    for name, entry in METHODS.items():
        if name not in installed:
            install = f'pip install "sb3-extra-buffers[{entry.extra}]"'
            click.echo(f'"{name}" needs a package that is not installed: {install}')
