"""Watch the DQN agent of example_train_gpu_replay.py play Ms. Pac-Man, or write a video if there is no screen."""

from __future__ import annotations

from collections.abc import Sequence

from stable_baselines3 import DQN

import common
from example_train_gpu_replay import GAME, NAME


def main(argv: Sequence[str] | None = None) -> None:
    common.watch(DQN, NAME, GAME, common.watching_arguments(__doc__).parse_args(argv))


if __name__ == "__main__":
    main()
