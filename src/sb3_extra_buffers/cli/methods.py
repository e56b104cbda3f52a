"""``methods``: which compression methods are installed, and how to install the rest."""

from __future__ import annotations

import json

import click

from sb3_extra_buffers.cli.common import table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def methods(as_json: bool) -> None:
    """List the compression methods, and how to install missing ones."""
    from sb3_extra_buffers.codecs import availability
    from sb3_extra_buffers.codecs.registry import METHODS, available_methods, codec_class, level_ranges, option_names

    installed = available_methods()
    missing = {
        name: f'pip install "sb3-extra-buffers[{entry.extra}]"'
        for name, entry in METHODS.items()
        if name not in installed
    }
    levels = {name: level_ranges(codec_class(name).levels) if codec_class(name).levels else None for name in METHODS}
    options = {name: [option for option in option_names(name) if option != "compresslevel"] for name in METHODS}
    if as_json:
        everything = [
            {"method": name, "levels": levels[name], "options": options[name], "install": missing.get(name)}
            for name in METHODS
        ]
        click.echo(json.dumps(everything, indent=1))
        return
    rows = [
        (name, "no" if name in missing else "yes", levels[name] or "-", ", ".join(options[name]) or "-")
        for name in METHODS
    ]
    click.echo(table(("method", "installed", "levels", "options"), rows, left=4))
    click.echo('\nThe default, "auto", picks one of the installed methods from the first observations that it sees.')
    if not availability.has_numba():
        click.echo('"delta" is many times faster with numba: pip install "sb3-extra-buffers[numba]"')
    for name, command in missing.items():
        click.echo(f'"{name}" needs a package that is not installed: {command}')
