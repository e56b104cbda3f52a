"""``bench``: compare the methods on the user's own environment."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

import click

from sb3_extra_buffers.cli.common import Play, algo_option, env_options, output_file
from sb3_extra_buffers.codecs.availability import require

REPLAY_SIZE, ROLLOUT_STEPS = 100_000, 2_048


@click.command()
@env_options(steps=2_000)
@algo_option("dqn or sac, whichever fits the actions; ppo if neither does")
@click.option(
    "--buffer-size",
    type=click.IntRange(1),
    help=f"Transitions in the buffer, counted over all environments. [default: {REPLAY_SIZE:,}; for ppo and a2c "
    f"{ROLLOUT_STEPS:,} times --n-envs]",
)
@click.option("--methods", help="Methods to compare, separated by commas, such as auto,zstd-5,'zstd-dict/9 x8'.")
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True, help="Transitions in a batch.")
@click.option("--repeats", type=click.IntRange(1), default=200, show_default=True, help="How many batches to sample.")
@click.option(
    "--policy", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="An SB3 model that plays, a .zip."
)
@output_file("--json", "Write the results to this file.", ".json")
@output_file("--html", "Write a report to this file, one page that works offline. Needs matplotlib.", ".html")
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
    """Compare the methods on your own environment.

    Plays it, measures memory and speed of SB3's buffer and of ours with each method, and recommends one. After a
    method, xN means N frames per record, and "indexed" means indexed colour.
    """
    # Mistakes are reported before the long work, and this one before the slow imports.
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
    # Files first: if printing fails, the results of the long work are kept.
    if json is not None:
        report.write_json(json)
    if html is not None:
        report.write_page(html)
    click.echo(report.as_text())
    if json is not None or html is not None:
        click.echo(f"\nWritten: {', '.join(str(path) for path in (json, html) if path is not None)}")
