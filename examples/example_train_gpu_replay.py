"""Train DQN on Ms. Pac-Man with a replay buffer on the GPU. With --device cpu, it also runs without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from stable_baselines3 import DQN
from stable_baselines3.common.utils import LinearSchedule

import common
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer
from sb3_extra_buffers.training_utils.atari import make_env

GAME, NAME = "MsPacmanNoFrameskip-v4", "dqn_mspacman_gpu"


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.training_arguments(__doc__, steps=10_000_000)
    parser.add_argument("--buffer-size", type=int, default=1_000_000, help="transitions in the replay buffer")
    parser.add_argument("--buffer-device", help="device of the observations; default: the network's")
    parser.add_argument("--heap-bytes", type=int, help="memory limit for compressed observations")
    options = parser.parse_args(argv)

    env = make_env(GAME, options.n_envs, framestack=options.framestack, seed=options.seed)
    eval_env = make_env(GAME, 1, framestack=options.framestack, seed=options.seed + 1_000)
    model = DQN(
        "CnnPolicy",
        env,
        buffer_size=options.buffer_size,
        learning_rate=LinearSchedule(1e-4, 0.0, 1.0),
        learning_starts=min(50_000, options.steps // 10),
        batch_size=32,
        target_update_interval=1_000,
        exploration_fraction=0.1,
        exploration_final_eps=0.01,
        replay_buffer_class=GpuReplayBuffer,
        replay_buffer_kwargs={
            "compression_method": options.compression,
            "buffer_device": options.buffer_device,
            "heap_bytes": options.heap_bytes,
        },
        tensorboard_log=options.log and str(options.log),
        seed=options.seed,
        device=options.device,
    )
    common.train(model, NAME, options, eval_env)
    env.close()
    eval_env.close()


if __name__ == "__main__":
    main()
