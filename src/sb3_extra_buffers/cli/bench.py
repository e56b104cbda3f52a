"""``bench``: compare SB3's buffer and our compression methods on the user's own environment."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

import click

from sb3_extra_buffers.cli.common import Play, algo_option, env_options, output_file
from sb3_extra_buffers.codecs.availability import require

REPLAY_SIZE, ROLLOUT_STEPS = 100_000, 2_048


@click.command()
@env_options(steps=4_096)
@algo_option("dqn or sac, depending on the action space; otherwise ppo")
@click.option(
    "--buffer-size",
    type=click.IntRange(1),
    help=f"Buffer size in transitions, over all environments. [default: {REPLAY_SIZE:,}; for ppo and a2c "
    f"{ROLLOUT_STEPS:,} steps of each environment]",
)
@click.option(
    "--methods",
    help='Comma-separated methods to compare, such as "auto,zstd-5,zstd-dict/9 x8". After a method, xN sets '
    "frames_per_record=N, and indexed sets indexed_colour=True. [default: a selection]",
)
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True, help="Transitions per batch.")
@click.option("--repeats", type=click.IntRange(1), default=200, show_default=True, help="Number of batches to sample.")
@click.option(
    "--policy",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Saved SB3 model (.zip) that chooses the actions. [default: random actions]",
)
@output_file("--json", "Write the results to this .json file.", ".json")
@output_file("--html", "Write a report with a chart to this .html file. Needs matplotlib.", ".html")
def bench(
    play: Play,
    algo: str | None,
    buffer_size: int | None,
    methods: str | None,
    batch_size: int,
    repeats: int,
    policy: Path | None,
    json: Path | None,
    html: Path | None,
) -> None:
    """Compare SB3's buffer with ours on your environment.

    Plays the environment, measures memory and speed of SB3's buffer and of ours with each compression method, and
    recommends one.
    """
    # Report mistakes before the environment is played, and this one even before the slow imports.
    if html is not None:
        require("matplotlib", "A chart", "plots")

    from sb3_extra_buffers.cli.report import Report
    from sb3_extra_buffers.measure.buffers import Task, buffer_arguments, default_methods
    from sb3_extra_buffers.measure.comparison import compare
    from sb3_extra_buffers.measure.recommendation import buffer_kind, choose_algorithm, recommend
    from sb3_extra_buffers.measure.transitions import TransitionFile

    chosen = [] if methods is None else [method.strip() for method in methods.split(",")]
    for method in chosen:
        buffer_arguments(method)

    with tempfile.TemporaryDirectory(prefix="sb3-extra-buffers-") as folder:
        with closing(play.make_env()) as env:
            algo = choose_algorithm(env.action_space, algo)
            task = Task(buffer_kind(algo), env.observation_space, env.action_space, play.n_envs)
            data = TransitionFile.write(Path(folder) / "transitions", env, play.transitions(env, policy))
        size = buffer_size or (REPLAY_SIZE if task.kind == "Replay" else ROLLOUT_STEPS * play.n_envs)
        comparison = compare(task, data, chosen or default_methods(task.observation_space), size, batch_size, repeats)
    player = "a random policy" if policy is None else policy.name
    report = Report(play.env_id, player, comparison, recommend(comparison, algo))
    # Files first: if printing fails, the results are not lost.
    if json is not None:
        report.write_json(json)
    if html is not None:
        report.write_page(html)
    click.echo(report.as_text())
    if json is not None or html is not None:
        click.echo(f"\nResults written to {', '.join(str(path) for path in (json, html) if path is not None)}")
