"""Train PPO on Pong with a rollout buffer on the GPU. With --device cpu, it also runs without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from stable_baselines3 import PPO
from stable_baselines3.common.utils import LinearSchedule

import common
from sb3_extra_buffers.gpu_buffers import GpuRolloutBuffer
from sb3_extra_buffers.training_utils.atari import make_env

GAME, NAME = "PongNoFrameskip-v4", "ppo_pong_gpu"


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.training_arguments(__doc__, steps=10_000_000)
    parser.add_argument("--buffer-device", help="device of the observations; default: the network's")
    options = parser.parse_args(argv)

    env = make_env(GAME, options.n_envs, framestack=options.framestack, seed=options.seed)
    eval_env = make_env(GAME, 1, framestack=options.framestack, seed=options.seed + 1_000)
    model = PPO(
        "CnnPolicy",
        env,
        learning_rate=LinearSchedule(2.5e-4, 0.0, 1.0),
        clip_range=LinearSchedule(0.1, 0.0, 1.0),
        **common.rollout_size(options, n_steps=128, batch_size=256),
        n_epochs=4,
        ent_coef=0.01,
        rollout_buffer_class=GpuRolloutBuffer,
        rollout_buffer_kwargs={
            "compression_method": options.compression,
            "buffer_device": options.buffer_device,
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
