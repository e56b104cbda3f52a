"""Watch the PPO agent of example_train_gpu_rollout.py play Pong, or write a video if there is no screen."""

from __future__ import annotations

from collections.abc import Sequence

from stable_baselines3 import PPO

import common
from example_train_gpu_rollout import GAME, NAME


def main(argv: Sequence[str] | None = None) -> None:
    common.watch(PPO, NAME, GAME, common.watching_arguments(__doc__).parse_args(argv))


if __name__ == "__main__":
    main()
