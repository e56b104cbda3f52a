"""``demo``: train twice with the same seed, once with SB3's buffer and once with ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sb3_extra_buffers.cli.common import table

if TYPE_CHECKING:
    from sb3_extra_buffers.measure.training import TrainingRun


@click.command()
@click.option("--env", "env_id", default="MsPacmanNoFrameskip-v4", show_default=True, help="An Atari game.")
@click.option(
    "--steps", type=click.IntRange(1), default=8_000, show_default=True, help="Environment steps of each run."
)
@click.option(
    "--buffer-size", type=click.IntRange(1), default=40_000, show_default=True, help="Transitions in the buffer."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of both runs.")
def demo(env_id: str, steps: int, buffer_size: int, seed: int) -> None:
    """Train DQN twice: with SB3's buffer, then with ours.

    Prints memory and speed of both runs. They use the same seed, each in its own process, and must end with
    bit-identical networks. The exit code is 1 if the networks differ.
    """
    from sb3_extra_buffers.errors import ConfigurationError
    from sb3_extra_buffers.measure.buffers import SB3
    from sb3_extra_buffers.measure.environments import is_atari
    from sb3_extra_buffers.measure.processes import run_in_fresh_process
    from sb3_extra_buffers.measure.training import N_ENVS, train

    if not is_atari(env_id):
        raise ConfigurationError(f"{env_id!r} is not an Atari game. Pass one as --env, such as PongNoFrameskip-v4.")
    click.echo(f"DQN on {env_id}: {steps:,} steps in {N_ENVS} environments, once with each buffer\n")
    sb3, ours = (run_in_fresh_process(train, method, env_id, steps, buffer_size, seed) for method in (SB3, "auto"))

    headings = (f"{sb3.transitions:,} transitions stored", "SB3 ReplayBuffer", "CompressedReplayBuffer")
    rows = [(label, first, second) for (label, first), (_, second) in zip(_figures(sb3), _figures(ours), strict=True)]
    click.echo(f"\n{table(headings, rows)}")
    click.echo("\nPeak process memory also includes Python, PyTorch, the networks and the games.")
    click.echo(f"\nCompressedReplayBuffer.memory_usage():\n{ours.memory_usage}")
    if sb3.policy_hash != ours.policy_hash:
        raise click.ClickException(
            "The trained networks differ. This is a bug: please report it with the output above."
        )
    click.echo(f"\nTrained networks: bit-identical (sha256 {ours.policy_hash[:16]})")


def _figures(run: TrainingRun) -> list[tuple[str, str]]:
    return [
        ("buffer memory", f"{run.buffer_bytes / 1e6:,.1f} MB"),
        ("  per transition", f"{run.buffer_bytes / run.transitions:,.0f} bytes"),
        ("peak process memory", f"{run.peak_rss / 1e6:,.0f} MB"),
        ("environment steps per second", f"{run.transitions / run.seconds:,.0f}"),
    ]
