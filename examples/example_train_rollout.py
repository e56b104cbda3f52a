"""Train PPO on Pong with a compressed rollout buffer."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from stable_baselines3 import PPO
from stable_baselines3.common.utils import LinearSchedule

import common
from sb3_extra_buffers.compressed import CompressedRolloutBuffer, find_buffer_dtypes
from sb3_extra_buffers.training_utils.atari import make_env

GAME, NAME = "PongNoFrameskip-v4", "ppo_pong"


def main(argv: Sequence[str] | None = None) -> None:
    train(GAME, NAME, common.training_arguments(__doc__, steps=10_000_000).parse_args(argv))


def train(game: str, name: str, options: Namespace) -> None:
    # This also compiles numba methods once, before the environments start their own processes.
    dtypes = find_buffer_dtypes((options.framestack, 84, 84), compression_method=options.compression)
    env = make_env(game, options.n_envs, framestack=options.framestack, seed=options.seed)
    eval_env = make_env(game, 1, framestack=options.framestack, seed=options.seed + 1_000)
    model = PPO(
        "CnnPolicy",
        env,
        learning_rate=LinearSchedule(2.5e-4, 0.0, 1.0),
        clip_range=LinearSchedule(0.1, 0.0, 1.0),
        **common.rollout_size(options, n_steps=128, batch_size=256),
        n_epochs=4,
        ent_coef=0.01,
        rollout_buffer_class=CompressedRolloutBuffer,
        rollout_buffer_kwargs={"compression_method": options.compression, "dtypes": dtypes},
        tensorboard_log=options.log and str(options.log),
        seed=options.seed,
        device=options.device,
    )
    common.train(model, name, options, eval_env)
    env.close()
    eval_env.close()


if __name__ == "__main__":
    main()
