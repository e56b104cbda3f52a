"""Train DQN on Ms. Pac-Man with a compressed replay buffer."""

from __future__ import annotations

from collections.abc import Sequence

from stable_baselines3 import DQN
from stable_baselines3.common.utils import LinearSchedule

import common
from sb3_extra_buffers.compressed import CompressedReplayBuffer, find_buffer_dtypes
from sb3_extra_buffers.training_utils.atari import make_env
from sb3_extra_buffers.training_utils.buffer_warmup import warm_up

GAME, NAME = "MsPacmanNoFrameskip-v4", "dqn_mspacman"


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.training_arguments(__doc__, steps=10_000_000)
    parser.add_argument("--buffer-size", type=int, default=1_000_000, help="transitions in the replay buffer")
    parser.add_argument("--warm-up", type=int, default=0, metavar="EPISODES", help="episodes to store before training")
    options = parser.parse_args(argv)

    # This also compiles numba methods once, before the environments start their own processes.
    dtypes = find_buffer_dtypes((options.framestack, 84, 84), compression_method=options.compression)
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
        replay_buffer_class=CompressedReplayBuffer,
        replay_buffer_kwargs={"compression_method": options.compression, "dtypes": dtypes},
        tensorboard_log=options.log and str(options.log),
        seed=options.seed,
        device=options.device,
    )
    if options.warm_up and model.replay_buffer is not None:
        print(warm_up(model.replay_buffer, options.n_envs, env, model, warmup_episodes=options.warm_up))
    common.train(model, NAME, options, eval_env)
    env.close()
    eval_env.close()


if __name__ == "__main__":
    main()
