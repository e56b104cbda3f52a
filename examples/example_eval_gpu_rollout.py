"""Evaluate the PPO agent that example_train_gpu_rollout.py trained on Pong."""

from __future__ import annotations

from collections.abc import Sequence

from stable_baselines3 import PPO

import common
from example_train_gpu_rollout import GAME, NAME


def main(argv: Sequence[str] | None = None) -> None:
    common.evaluate(PPO, NAME, GAME, common.evaluation_arguments(__doc__).parse_args(argv))


if __name__ == "__main__":
    main()
