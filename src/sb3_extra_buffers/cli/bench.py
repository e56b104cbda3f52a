"""``bench``: the methods, measured on the user's own environment."""

from __future__ import annotations

from pathlib import Path

import click

from sb3_extra_buffers.cli.options import output_file, playing_options
from sb3_extra_buffers.codecs.availability import require


@click.command()
@playing_options(steps=2_000)
@click.option("--methods", help="Methods to compare, separated by commas, such as auto,zstd-5,'zstd-dict/9 x8'.")
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True, help="Of a sample.")
@click.option("--repeats", type=click.IntRange(1), default=200, show_default=True, help="Samples to take.")
@click.option(
    "--policy", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Model that plays, a .zip of SB3's."
)
@click.option("--algo", help="Algorithm of --policy, such as dqn. [default: told by the file]")
@output_file("--json", "Write the results to this file.", (".json",))
@output_file("--plot", "Write a picture to this file: .png, .svg or .pdf. Needs matplotlib.", (".png", ".svg", ".pdf"))
@output_file("--html", "Write a report to this file, a page that opens without a network.", (".html",))
def bench(
    env_id: str,
    n_envs: int,
    frame_stack: int | None,
    seed: int,
    buffer_size: int,
    steps: int,
    methods: str | None,
    batch_size: int,
    repeats: int,
    policy: Path | None,
    algo: str | None,
    json: Path | None,
    plot: Path | None,
    html: Path | None,
) -> None:
    """Compare the methods on your own environment.

    Plays it, measures what buffers take for what is seen there, and recommends one. Memory is what a fresh process
    grows by; times are measured with the buffers taking turns. After a method may stand xN for N frames per record, and
    "indexed" for indexed colour.
    """
    # Whatever can be wrong is found before the long work, and this before the imports that take long.
    if algo is not None and policy is None:
        raise click.UsageError("--algo is the algorithm of a --policy, of which there is none.")
    if plot is not None:
        require("matplotlib", "A plot", "plots")

    from sb3_extra_buffers.cli.played import played
    from sb3_extra_buffers.cli.report import Report
    from sb3_extra_buffers.cli.report.data import write_json
    from sb3_extra_buffers.cli.report.page import write_page
    from sb3_extra_buffers.cli.report.plot import write_plot
    from sb3_extra_buffers.cli.report.text import as_text
    from sb3_extra_buffers.measure.comparison import compare
    from sb3_extra_buffers.measure.recommendation import recommend
    from sb3_extra_buffers.measure.subjects import buffer_arguments, usual_subjects

    chosen = [] if methods is None else [method.strip() for method in methods.split(",")]
    for method in chosen:
        buffer_arguments(method)

    with played(env_id, n_envs, frame_stack, seed, steps, policy, algo) as play:
        subjects = chosen or usual_subjects(play.observation_space)
        comparison = compare(play, subjects, buffer_size, batch_size, repeats)
    player = "a random policy" if policy is None else policy.name
    report = Report(env_id, player, comparison, recommend(comparison))
    # Files first: whatever may go wrong with the terminal, what took long to measure is kept.
    files = {path: write for path, write in ((json, write_json), (plot, write_plot), (html, write_page)) if path}
    for path, write in files.items():
        write(path, report)
    click.echo(as_text(report))
    if files:
        click.echo(f"\nWritten: {', '.join(map(str, files))}")
