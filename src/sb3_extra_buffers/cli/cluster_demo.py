"""``cluster-demo``: train DQN with a learner and several collectors on Ray."""

from __future__ import annotations

import os

import click

from sb3_extra_buffers.cli.common import table


@click.command("cluster-demo")
@click.option(
    "--env",
    "env_id",
    default="MsPacmanNoFrameskip-v4",
    show_default=True,
    help="An environment with discrete actions.",
)
@click.option("--collectors", type=click.IntRange(1), default=2, show_default=True, help="Number of collectors.")
@click.option("--envs", type=click.IntRange(1), default=4, show_default=True, help="Environments per collector.")
@click.option("--steps", type=click.IntRange(1), default=10_000, show_default=True, help="Transitions to train on.")
@click.option("--address", help="Address of a Ray cluster. By default, Ray is started on this machine.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of learner and collectors.")
def cluster_demo(env_id: str, collectors: int, envs: int, steps: int, address: str | None, seed: int) -> None:
    """Train DQN with collectors in several processes.

    A learner in this process trains on the experience of collectors, which run in processes of their own on Ray. At the
    end, the command prints throughput, bytes per transition and waiting times.
    """
    # By default, idle threads of torch spin, which slows down the other processes. Must be set before importing torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from functools import partial

    from gymnasium import spaces
    from stable_baselines3 import DQN

    from sb3_extra_buffers.codecs.availability import require
    from sb3_extra_buffers.distributed import ShardedReplayBuffer, distributed
    from sb3_extra_buffers.distributed.status import StatusLine
    from sb3_extra_buffers.errors import ConfigurationError
    from sb3_extra_buffers.measure.environments import make_env
    from sb3_extra_buffers.measure.recommendation import policy_name

    require("ray", "This demo", "ray")
    env = make_env(env_id, 1, seed)
    if not isinstance(env.action_space, spaces.Discrete):
        raise ConfigurationError(
            f"The demo trains DQN, which needs discrete actions, but {env_id} has {env.action_space}. Choose another "
            "--env, such as CartPole-v1."
        )
    model = distributed(DQN)(
        policy_name(env.observation_space),
        env,
        buffer_size=max(steps, 10_000),
        learning_starts=min(1_000, steps // 8),
        replay_buffer_class=ShardedReplayBuffer,
        collectors={"n": collectors, "envs": envs, "make_env": partial(make_env, env_id, envs, seed)},
        ray={} if address is None else {"address": address},
        seed=seed,
    )
    click.echo(f"DQN on {env_id}: {collectors} collectors with {envs} environments each\n")
    model.learn(steps, callback=StatusLine())
    statistics = model.collector_statistics
    scalars, usage = statistics.scalars(), model.replay_buffer.memory_usage()
    rows = [
        ("transitions received", f"{statistics.transitions.sum():,}"),
        ("  per collector", ", ".join(f"{count:,}" for count in statistics.transitions.tolist())),
        ("transitions per second", f"{scalars['transitions_per_second']:,.0f}"),
        ("bytes per transition on the wire", f"{scalars['bytes_per_transition']:,.0f}"),
        ("bytes per transition in the buffer", f"{usage.bytes_per_transition:,.0f}"),
        ("gradient steps", f"{model._n_updates:,}"),
        ("time spent publishing weights", f"{scalars['fraction_publishing']:.2%}"),
        ("time spent waiting for collectors", f"{scalars['fraction_waiting']:.0%}"),
        ("collector restarts", f"{statistics.n_deaths}"),
    ]
    click.echo(f"\n{table(('training', ''), rows)}")
