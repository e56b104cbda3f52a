"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_PLAYING = (
    click.option(
        "--env",
        "env_id",
        required=True,
        metavar="ID",
        help="Name of the environment, such as CartPole-v1 or module:name.",
    ),
    click.option("--n-envs", type=click.IntRange(1), default=4, show_default=True, help="Copies played at once."),
    click.option(
        "--frame-stack",
        type=click.IntRange(1),
        help="Frames in an observation. [default: 4 for Atari, else 1]",
    ),
    click.option("--seed", type=int, default=0, show_default=True),
)


def playing_options(steps: int, buffer_size: int | None = 100_000) -> Callable[[Command], Command]:
    """The options of a command that plays an environment, by default for ``steps`` steps."""
    number = click.option(
        "--steps", type=click.IntRange(4), default=steps, show_default=True, help="Steps to play of each copy."
    )
    size = click.option(
        "--buffer-size",
        type=click.IntRange(1),
        default=buffer_size,
        show_default=buffer_size is not None,
        help="Transitions that you want to keep, those of all copies together."
        if buffer_size is not None
        else "Transitions in the buffer, those of all copies together. [default: a fraction of the play]",
    )

    def decorate(command: Command) -> Command:
        options = (_PLAYING[0], number, *_PLAYING[1:], size)
        return reduce(lambda decorated, option: option(decorated), reversed(options), command)

    return decorate


def output_file(name: str, text: str, formats: tuple[str, ...]) -> Callable[[Command], Command]:
    """An option for a file to be written, which ends with one of ``formats`` and lies in a folder that exists."""

    def check(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() not in formats:
            endings = " or ".join(formats)
            raise click.BadParameter(f"{path.name!r} does not end with {endings}.", context, parameter)
        if path is not None and not path.parent.is_dir():
            raise click.BadParameter(f"There is no folder {str(path.parent)!r}. Make it first.", context, parameter)
        return path

    return click.option(name, callback=check, type=click.Path(path_type=Path, dir_okay=False), help=text)
