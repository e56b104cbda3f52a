"""Train with collectors in several processes, on this machine or on a Ray cluster.

On a cluster, run ``ray start --head`` on the first machine and ``ray start --address HOST:6379`` on the others. Then
run this script on the first machine with ``--address auto``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from stable_baselines3 import DQN, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

import common
from sb3_extra_buffers.compressed import PrioritizedDQN
from sb3_extra_buffers.distributed import ShardedReplayBuffer, ape_x, distributed
from sb3_extra_buffers.training_utils.atari import make_env

ALGORITHMS: dict[str, Any] = {"dqn": DQN, "prioritized": PrioritizedDQN, "ppo": PPO}


def make(env_id: str, n_envs: int) -> VecEnv:
    """The environments of a collector, which seeds them itself so that no two collectors play the same episodes."""
    if "NoFrameskip" in env_id:
        return make_env(env_id, n_envs, DummyVecEnv)
    return make_vec_env(env_id, n_envs)


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.arguments(__doc__, steps=1_000_000, n_envs=4)
    parser.add_argument("--algo", choices=ALGORITHMS, default="dqn", help="prioritized: DQN as in Ape-X")
    parser.add_argument("--env", default="MsPacmanNoFrameskip-v4", help="an environment with discrete actions")
    parser.add_argument("--collectors", type=int, default=2, help="collectors, each with --n-envs environments")
    parser.add_argument("--address", help="address of a Ray cluster, or 'auto' on its first machine")
    parser.add_argument("--in-process", action="store_true", help="run in one process, without Ray, for debugging")
    parser.add_argument("--buffer-size", type=int, default=1_000_000, help="transitions in the replay buffer")
    parser.add_argument("--log", help="folder for TensorBoard logs")
    options = parser.parse_args(argv)
    options.curve = None

    collectors: dict[str, Any] = {
        "n": options.collectors,
        "envs": options.n_envs,
        "make_env": partial(make, options.env, options.n_envs),
        "in_process": options.in_process,
    }
    given: dict[str, Any] = {"tensorboard_log": options.log, "seed": options.seed, "device": options.device}
    if options.algo == "ppo":
        n_steps = max(2, min(128, options.steps // (options.collectors * options.n_envs)))
        given |= {"n_steps": n_steps, "batch_size": min(256, n_steps * options.collectors * options.n_envs)}
        given |= {"n_epochs": 4, "ent_coef": 0.01, "clip_range": 0.1, "learning_rate": 2.5e-4}
    else:
        given |= {"replay_buffer_class": ShardedReplayBuffer, "buffer_size": options.buffer_size}
        given |= {"learning_starts": min(50_000, options.steps // 10), "target_update_interval": 1_000}
    if options.algo == "prioritized":
        given["replay_buffer_kwargs"] = {"n_steps": 3, "gamma": 0.99}
        collectors["algorithm_kwargs"] = ape_x
    env = make(options.env, 1)
    model = distributed(ALGORITHMS[options.algo])(
        "CnnPolicy" if len(env.observation_space.shape or ()) == 3 else "MlpPolicy",
        env,
        collectors=collectors,
        ray={} if options.address is None else {"address": options.address},
        **given,
    )
    common.train(model, f"{options.algo}_distributed", options)
    for name, value in model.collector_statistics.scalars().items():
        print(f"{name.replace('_', ' ')}: {value:,.4g}")
    env.close()


if __name__ == "__main__":
    main()
