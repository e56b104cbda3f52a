"""Evaluate the DQN agent that example_train_gpu_replay.py trained on Ms. Pac-Man."""

from __future__ import annotations

from collections.abc import Sequence

from stable_baselines3 import DQN

import common
from example_train_gpu_replay import GAME, NAME


def main(argv: Sequence[str] | None = None) -> None:
    common.evaluate(DQN, NAME, GAME, common.evaluation_arguments(__doc__).parse_args(argv))


if __name__ == "__main__":
    main()
