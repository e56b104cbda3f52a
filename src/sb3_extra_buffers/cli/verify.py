"""``verify``: the user's environment through SB3's buffer and ours, and everything compared."""

from __future__ import annotations

import click

from sb3_extra_buffers.cli.options import playing_options

_LARGEST_BUFFER = 10_000
_FILLS = 4
_ROLLOUTS = 60
_SHORTEST_ROLLOUT, _LONGEST_ROLLOUT = 5, 128


@click.command()
@playing_options(steps=5_000, buffer_size=None)
@click.option(
    "--algo",
    type=click.Choice(["dqn", "ppo"]),
    help="Whose buffer: the replay buffer of DQN, SAC, TD3..., or the rollout buffer of PPO, A2C... [default: both]",
)
@click.option("--method", default="auto", show_default=True, help="Compression method, as for bench.")
def verify(
    env_id: str,
    n_envs: int,
    frame_stack: int | None,
    seed: int,
    buffer_size: int | None,
    steps: int,
    algo: str | None,
    method: str,
) -> None:
    """Check that our buffers return exactly what SB3's do.

    Plays your environment at random, gives each step to SB3's buffer and to ours, and compares what comes out, to the
    last bit: batches under the same seed at many moments, and everything that is stored whenever the buffers have been
    filled. The buffers are small, so that they are overwritten several times. The exit code is 1 if anything differs.
    """
    from contextlib import closing

    from tqdm import tqdm

    from sb3_extra_buffers.measure.environments import describe, make_env
    from sb3_extra_buffers.measure.playing import play
    from sb3_extra_buffers.measure.subjects import buffer_arguments
    from sb3_extra_buffers.measure.verification import (
        ReplayVerification,
        RolloutVerification,
        Tally,
        replay_pair,
        rollout_pair,
    )

    options = buffer_arguments(method)
    with closing(make_env(env_id, n_envs, seed, frame_stack)) as env:
        spaces = env.observation_space, env.action_space, n_envs
        verifications: dict[str, ReplayVerification | RolloutVerification] = {}
        if algo in (None, "dqn"):
            size = buffer_size or max(n_envs, min(_LARGEST_BUFFER, steps * n_envs // _FILLS))
            pair = replay_pair(size, *spaces, **options)
            verifications[f"replay buffer of {size:,} transitions"] = ReplayVerification(pair, steps, seed)
        if algo in (None, "ppo"):
            length = max(_SHORTEST_ROLLOUT, min(_LONGEST_ROLLOUT, steps // _ROLLOUTS))
            length = length if buffer_size is None else max(1, buffer_size // n_envs)
            pair = rollout_pair(length, *spaces, **options)
            verifications[f"rollout buffer of {length:,} steps"] = RolloutVerification(pair, seed)
        for transition in tqdm(play(env, steps, seed), f"playing {env_id}", total=steps, unit="step"):
            for verification in verifications.values():
                verification.add(transition)
    tallies: dict[str, Tally] = {name: verification.finish() for name, verification in verifications.items()}

    click.echo(f"{env_id}: {steps:,} steps of {n_envs} copies, observations {describe(env.observation_space)}")
    for name, tally in tallies.items():
        label = verifications[name].pair.ours.memory_usage().method
        click.echo(f"  {name}, {label}: filled {tally.fills:,} times, {tally.batches:,} batches compared")
    if any(tally.fills == 0 for tally in tallies.values()):
        click.echo(
            "A buffer was never filled, so nothing was overwritten: give more --steps or a smaller --buffer-size."
        )
    click.echo(f"{sum(tally.observations for tally in tallies.values()):,} observations compared, all identical.")
