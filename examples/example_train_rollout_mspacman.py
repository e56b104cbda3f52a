"""Train PPO on Ms. Pac-Man with a compressed rollout buffer, with the settings of example_train_rollout.py."""

from __future__ import annotations

from collections.abc import Sequence

import common
from example_train_rollout import train

GAME, NAME = "MsPacmanNoFrameskip-v4", "ppo_mspacman"


def main(argv: Sequence[str] | None = None) -> None:
    train(GAME, NAME, common.training_arguments(__doc__, steps=10_000_000).parse_args(argv))


if __name__ == "__main__":
    main()
