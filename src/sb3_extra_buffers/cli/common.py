"""Shared by several commands: options, playing an environment, and tables."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from sb3_extra_buffers.measure.transitions import Transition

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Play:
    """Which environment to play, and for how long. :func:`env_options` passes it to a command as ``play``."""

    env_id: str
    steps: int
    n_envs: int
    frame_stack: int | None
    env_kwargs: dict[str, Any]
    wrapper: str | None
    seed: int

    def make_env(self) -> VecEnv:
        from sb3_extra_buffers.measure.environments import make_env

        return make_env(self.env_id, self.n_envs, self.seed, self.frame_stack, self.env_kwargs, self.wrapper)

    def transitions(self, env: VecEnv, policy: Path | None = None) -> Iterator[Transition]:
        """Play with random actions or a saved policy, and show a progress bar."""
        from tqdm import tqdm

        from sb3_extra_buffers.errors import ExtraBuffersError
        from sb3_extra_buffers.measure.policies import load_policy
        from sb3_extra_buffers.measure.transitions import collect

        model = None if policy is None else load_policy(policy, env)
        collected = collect(env, self.steps, self.seed, model)
        try:
            yield from tqdm(collected, f"playing {self.env_id}", total=self.steps, unit="step")
        except ExtraBuffersError:
            raise
        except Exception as error:  # an environment may raise anything
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise click.ClickException(
                f"The environment {self.env_id!r} raised {type(error).__name__}: {error} (in {where.filename}, "
                f"line {where.lineno}). Test it with SB3's check_env(env)."
            ) from error


def env_options(steps: int) -> Callable[[Command], Any]:
    """The options of a command that plays an environment, passed to it as one argument, ``play``."""
    number = click.IntRange(1)
    options = (
        click.option(
            "--env",
            "env_id",
            required=True,
            metavar="ID",
            help="Gymnasium id, such as CartPole-v1, or module:Env-v0 if the module registers it.",
        ),
        click.option("--env-kwargs", callback=_json_object, metavar="JSON", help="Arguments for gymnasium.make()."),
        click.option(
            "--wrapper", metavar="MODULE:CLASS", help="Environment wrapper. It replaces SB3's wrappers for Atari."
        ),
        click.option(
            "--steps", type=click.IntRange(4), default=steps, show_default=True, help="Steps of each environment."
        ),
        click.option("--n-envs", type=number, default=4, show_default=True, help="Number of environments."),
        click.option("--frame-stack", type=number, help="Frames per observation. [default: 4 for Atari, else 1]"),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of environments and random actions."),
    )

    def decorate(command: Command) -> Any:
        @functools.wraps(command)
        def bundled(**given: Any) -> Any:
            play = Play(**{name: given.pop(name) for name in Play.__dataclass_fields__})
            return command(play=play, **given)

        for option in reversed(options):
            bundled = option(bundled)
        return bundled

    return decorate


def algo_option(default: str) -> Callable[[Command], Command]:
    return click.option(
        "--algo",
        type=click.Choice(["dqn", "sac", "td3", "ppo", "a2c"]),
        help="Algorithm to train with: ppo and a2c use rollout buffers, the others replay buffers. "
        f"[default: {default}]",
    )


def _json_object(context: click.Context, parameter: click.Parameter, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise click.BadParameter(f"""{text!r} is not a JSON object, such as '{{"name": 1}}'.""", context, parameter)
    return value


def output_file(name: str, text: str, suffix: str) -> Callable[[Command], Command]:
    """An option for an output file. The file must have the suffix, and its folder must exist."""

    def check(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() != suffix:
            raise click.BadParameter(f"{path.name!r} does not end with {suffix}.", context, parameter)
        if path is not None and not path.parent.is_dir():
            raise click.BadParameter(f"There is no folder {str(path.parent)!r}. Create it first.", context, parameter)
        return path

    return click.option(name, callback=check, type=click.Path(path_type=Path, dir_okay=False), help=text)


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
