"""``verify``: check on the user's own environment that our buffers return what SB3's do."""

from __future__ import annotations

from contextlib import closing

import click

from sb3_extra_buffers.cli.common import Play, algo_option, env_options

_MAX_REPLAY_SIZE = 10_000
"""The largest default size of the replay buffer, in transitions."""
_FILLS = 4
"""How many times the steps fill a replay buffer of the default size, unless that would be too large."""
_ROLLOUTS = 60
"""How many rollouts of the default size the steps are divided into, within the limits that follow."""
_MIN_ROLLOUT, _MAX_ROLLOUT = 5, 128
"""Limits of the default rollout size, in steps of each environment."""


@click.command()
@env_options(steps=5_000)
@algo_option("check both kinds of buffers")
@click.option(
    "--buffer-size",
    type=click.IntRange(1),
    help="Buffer size in transitions, over all environments. [default: small enough to be overwritten several times]",
)
@click.option("--method", default="auto", show_default=True, help="Compression method, as for bench --methods.")
def verify(play: Play, algo: str | None, buffer_size: int | None, method: str) -> None:
    """Check that our buffers return the same values as SB3's.

    Plays your environment with random actions, adds each step to SB3's buffer and to ours, and compares them bit for
    bit: batches drawn with the same seed, and the whole contents each time the buffers are full. By default, buffers
    are small, so that they are overwritten several times. The exit code is 1 if anything differs.
    """
    from sb3_extra_buffers.measure.buffers import Task, buffer_arguments
    from sb3_extra_buffers.measure.environments import describe
    from sb3_extra_buffers.measure.recommendation import buffer_kind
    from sb3_extra_buffers.measure.verification import Verification

    buffer_arguments(method)  # raises for an invalid method before the environment is played
    steps, n_envs = play.steps, play.n_envs
    sizes = {
        "Replay": buffer_size or max(n_envs, min(_MAX_REPLAY_SIZE, steps * n_envs // _FILLS)),
        "Rollout": buffer_size or max(_MIN_ROLLOUT, min(_MAX_ROLLOUT, steps // _ROLLOUTS)) * n_envs,
    }
    with closing(play.make_env()) as env:
        verifications = [
            Verification(
                Task(kind, env.observation_space, env.action_space, n_envs), method, sizes[kind], steps, play.seed
            )
            for kind in (("Replay", "Rollout") if algo is None else (buffer_kind(algo),))
        ]
        for transition in play.transitions(env):
            for verification in verifications:
                verification.add(transition)
    tallies = [verification.finish() for verification in verifications]

    click.echo(
        f"{play.env_id}: {steps:,} steps of {n_envs} environments, observations {describe(env.observation_space)}"
    )
    for verification, tally in zip(verifications, tallies, strict=True):
        kind, ours = verification.task.kind, verification.ours
        size = f"{sizes[kind]:,} transitions" if kind == "Replay" else f"{ours.buffer_size:,} steps"
        click.echo(
            f"  {kind.lower()} buffer of {size}, {ours.memory_usage().method}: filled {tally.fills:,} times, "
            f"{tally.batches:,} batches compared"
        )
    if any(tally.fills == 0 for tally in tallies):
        click.echo(
            "A buffer never became full, so overwriting was not tested: use more --steps or a smaller --buffer-size."
        )
    click.echo(f"{sum(tally.observations for tally in tallies):,} observations compared, all identical.")
