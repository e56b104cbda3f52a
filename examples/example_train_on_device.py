"""Train PPO or DQN on a Breakout that runs on the GPU. Rollouts stay there: nothing is copied to the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stable_baselines3 import DQN, PPO
from stable_baselines3.common.evaluation import evaluate_policy

import common
from device_breakout import STACK, DeviceBreakout
from sb3_extra_buffers.training_utils.device_env import DeviceVecEnv
from sb3_extra_buffers.training_utils.device_loop import on_device


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.arguments(__doc__, steps=2_000_000, n_envs=256)
    parser.add_argument("--algo", choices=("ppo", "dqn"), default="ppo", help="algorithm to train")
    parser.add_argument("--compression", default="auto", help="method: auto, none, delta or rle")
    parser.add_argument("--buffer-size", type=int, default=200_000, help="transitions in DQN's replay buffer")
    parser.add_argument("--episodes", type=int, default=256, help="episodes to evaluate before and after training")
    parser.add_argument("--curve", type=Path, metavar="CSV", help="write the learning curve to this file")
    options = parser.parse_args(argv)

    env = DeviceVecEnv(DeviceBreakout(options.n_envs, options.device, options.seed))
    # Without frame_stack, the buffer would detect the stack on the host, from the first observations.
    buffer = {"compression_method": options.compression, "frame_stack": STACK}
    model: Any
    if options.algo == "ppo":
        model = on_device(PPO)(
            "CnnPolicy",
            env,
            learning_rate=5e-4,
            **common.rollout_size(options, n_steps=32, batch_size=1024),
            n_epochs=4,
            ent_coef=0.01,
            clip_range=0.1,
            rollout_buffer_kwargs=buffer,
            seed=options.seed,
            device=options.device,
        )
    else:
        model = on_device(DQN)(
            "CnnPolicy",
            env,
            learning_rate=5e-4,
            buffer_size=options.buffer_size,
            learning_starts=min(20_000, options.steps // 10),
            batch_size=256,
            train_freq=1,
            gradient_steps=max(options.n_envs // 8, 1),  # one batch of 256 for every 8 new transitions
            target_update_interval=5_000,
            exploration_fraction=min(100_000 / options.steps, 0.5),
            exploration_final_eps=0.02,
            replay_buffer_kwargs=buffer,
            seed=options.seed,
            device=options.device,
        )

    def evaluate() -> str:
        games = DeviceVecEnv(
            DeviceBreakout(min(options.n_envs, options.episodes), options.device, options.seed + 10_000)
        )
        mean, deviation = evaluate_policy(model, games, options.episodes, deterministic=False)
        return f"{mean:.2f} ± {deviation:.2f} bricks per game"

    before = evaluate()
    common.train(model, f"{options.algo}_breakout_on_device", options)
    print(f"before training: {before}\nafter training:  {evaluate()}")
    env.close()


if __name__ == "__main__":
    main()
