"""``bench``: compare the methods on the user's own environment."""

from __future__ import annotations

from pathlib import Path

import click

from sb3_extra_buffers.cli.common import collected_transitions, env_options, output_file
from sb3_extra_buffers.codecs.availability import require


@click.command()
@env_options(steps=2_000)
@click.option("--methods", help="Methods to compare, separated by commas, such as auto,zstd-5,'zstd-dict/9 x8'.")
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True, help="Transitions in a batch.")
@click.option("--repeats", type=click.IntRange(1), default=200, show_default=True, help="How many batches to sample.")
@click.option(
    "--policy", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="An SB3 model that plays, a .zip."
)
@click.option("--algo", help="Algorithm of --policy, such as dqn. [default: read from the file]")
@output_file("--json", "Write the results to this file.", (".json",))
@output_file("--plot", "Write a chart to this file: .png, .svg or .pdf. Needs matplotlib.", (".png", ".svg", ".pdf"))
@output_file("--html", "Write a report to this file, one page that works offline. Needs matplotlib.", (".html",))
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

    Plays it, measures memory and speed of SB3's buffer and of ours with each method, and recommends one. After a
    method, xN means N frames per record, and "indexed" means indexed colour.
    """
    # Mistakes are reported before the long work, and these before the slow imports.
    if algo is not None and policy is None:
        raise click.UsageError("--algo is the algorithm of a --policy. Pass one, or leave --algo out.")
    if plot is not None or html is not None:
        require("matplotlib", "A chart", "plots")

    from sb3_extra_buffers.cli.report import Report
    from sb3_extra_buffers.measure.buffers import buffer_arguments, default_methods
    from sb3_extra_buffers.measure.comparison import compare
    from sb3_extra_buffers.measure.recommendation import recommend

    chosen = [] if methods is None else [method.strip() for method in methods.split(",")]
    for method in chosen:
        buffer_arguments(method)

    with collected_transitions(env_id, n_envs, frame_stack, seed, steps, policy, algo) as data:
        comparison = compare(data, chosen or default_methods(data.observation_space), buffer_size, batch_size, repeats)
    report = Report(env_id, "a random policy" if policy is None else policy.name, comparison, recommend(comparison))
    # Files first: if printing fails, the results of the long work are kept.
    files = [
        (path, write)
        for path, write in ((json, report.write_json), (plot, report.write_plot), (html, report.write_page))
        if path is not None
    ]
    for path, write in files:
        write(path)
    click.echo(report.as_text())
    if files:
        click.echo(f"\nWritten: {', '.join(str(path) for path, _ in files)}")
