"""``verify``: compare our buffers with SB3's on the user's own environment."""

from __future__ import annotations

import click

from sb3_extra_buffers.cli.common import env_options

_MAX_BUFFER_SIZE = 10_000
_FILLS = 4
_ROLLOUTS = 60
_MIN_ROLLOUT, _MAX_ROLLOUT = 5, 128


@click.command()
@env_options(steps=5_000, buffer_size=None)
@click.option(
    "--algo",
    type=click.Choice(["dqn", "ppo"]),
    help="dqn: only replay buffers (DQN, SAC, TD3...). ppo: only rollout buffers (PPO, A2C...). [default: both]",
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

    Plays your environment at random, adds each step to SB3's buffer and to ours, and compares them bit for bit: batches
    drawn with the same seed at many steps, and everything stored whenever the buffers are full. The buffers are small,
    so that they are overwritten several times. The exit code is 1 if anything differs.
    """
    from contextlib import closing

    from tqdm import tqdm

    from sb3_extra_buffers.measure.buffers import buffer_arguments
    from sb3_extra_buffers.measure.environments import describe, make_env
    from sb3_extra_buffers.measure.transitions import collect
    from sb3_extra_buffers.measure.verification import (
        ReplayVerification,
        RolloutVerification,
        replay_pair,
        rollout_pair,
    )

    buffer_arguments(method)  # raises if it is wrong, before the environment is made
    with closing(make_env(env_id, n_envs, seed, frame_stack)) as env:
        spaces = env.observation_space, env.action_space, n_envs
        verifications: dict[str, ReplayVerification | RolloutVerification] = {}
        if algo in (None, "dqn"):
            size = buffer_size or max(n_envs, min(_MAX_BUFFER_SIZE, steps * n_envs // _FILLS))
            pair = replay_pair(size, *spaces, method)
            verifications[f"replay buffer of {size:,} transitions"] = ReplayVerification(pair, steps, seed)
        if algo in (None, "ppo"):
            length = max(_MIN_ROLLOUT, min(_MAX_ROLLOUT, steps // _ROLLOUTS))
            length = length if buffer_size is None else max(1, buffer_size // n_envs)
            pair = rollout_pair(length, *spaces, method)
            verifications[f"rollout buffer of {length:,} steps"] = RolloutVerification(pair, seed)
        for transition in tqdm(collect(env, steps, seed), f"playing {env_id}", total=steps, unit="step"):
            for verification in verifications.values():
                verification.add(transition)
    tallies = {name: verification.finish() for name, verification in verifications.items()}

    click.echo(f"{env_id}: {steps:,} steps of {n_envs} environments, observations {describe(env.observation_space)}")
    for name, tally in tallies.items():
        codec = verifications[name].pair.ours.memory_usage().method
        click.echo(f"  {name}, {codec}: filled {tally.fills:,} times, {tally.batches:,} batches compared")
    if any(tally.fills == 0 for tally in tallies.values()):
        click.echo("A buffer was never full, so nothing was overwritten: use more --steps or a smaller --buffer-size.")
    click.echo(f"{sum(tally.observations for tally in tallies.values()):,} observations compared, all identical.")
