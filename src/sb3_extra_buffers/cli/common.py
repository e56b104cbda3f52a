"""What several commands share: options, the transitions that they work on, and tables."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from sb3_extra_buffers.measure.transitions import TransitionFile

Command = TypeVar("Command", bound=Callable[..., Any])


def env_options(steps: int, buffer_size: int | None = 100_000) -> Callable[[Command], Command]:
    """The options of a command that plays an environment, with the defaults of ``--steps`` and ``--buffer-size``."""
    number = click.IntRange(1)
    size_help = "Transitions in the buffer, counted over all environments."
    if buffer_size is None:
        size_help += " [default: a fraction of those played]"
    options = (
        click.option(
            "--env", "env_id", required=True, metavar="ID", help="Gymnasium id, such as CartPole-v1 or module:name."
        ),
        click.option(
            "--steps", type=click.IntRange(4), default=steps, show_default=True, help="Steps of each environment."
        ),
        click.option("--n-envs", type=number, default=4, show_default=True, help="Environments played at once."),
        click.option("--frame-stack", type=number, help="Frames in an observation. [default: 4 for Atari, else 1]"),
        click.option("--seed", type=int, default=0, show_default=True),
        click.option(
            "--buffer-size", type=number, default=buffer_size, show_default=buffer_size is not None, help=size_help
        ),
    )
    return lambda command: reduce(lambda decorated, option: option(decorated), reversed(options), command)


def output_file(name: str, text: str, formats: tuple[str, ...]) -> Callable[[Command], Command]:
    """An option for a file to write. Its suffix must be one of ``formats``, and its folder must exist."""

    def check(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() not in formats:
            raise click.BadParameter(f"{path.name!r} does not end with {' or '.join(formats)}.", context, parameter)
        if path is not None and not path.parent.is_dir():
            raise click.BadParameter(f"There is no folder {str(path.parent)!r}. Make it first.", context, parameter)
        return path

    return click.option(name, callback=check, type=click.Path(path_type=Path, dir_okay=False), help=text)


@contextmanager
def collected_transitions(
    env_id: str,
    n_envs: int,
    frame_stack: int | None,
    seed: int,
    steps: int,
    policy: Path | None = None,
    algorithm: str | None = None,
) -> Iterator[TransitionFile]:
    """Play an environment into a temporary file, which is deleted at the end of the ``with`` block."""
    from tqdm import tqdm

    from sb3_extra_buffers.measure.environments import make_env
    from sb3_extra_buffers.measure.policies import load_policy
    from sb3_extra_buffers.measure.transitions import TransitionFile, collect

    with tempfile.TemporaryDirectory(prefix="sb3-extra-buffers-") as folder:
        with closing(make_env(env_id, n_envs, seed, frame_stack)) as env:
            model = None if policy is None else load_policy(policy, env, algorithm)
            bar = tqdm(collect(env, steps, seed, model), f"playing {env_id}", total=steps, unit="step")
            data = TransitionFile.write(Path(folder) / "transitions", env, bar)
        yield data


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table for a terminal. The first ``left`` columns are left-aligned, the others right-aligned."""
    cells = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
