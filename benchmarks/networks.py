"""A network for trainings in which only the buffer matters, shared with the tests."""

from __future__ import annotations

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor


class SmallCnn(BaseFeaturesExtractor):
    """A fast network, which takes about a millisecond, but sees enough of an image to reveal a difference."""

    def __init__(self, observation_space: spaces.Box) -> None:
        super().__init__(observation_space, features_dim=16)
        channels, height, width = observation_space.shape
        self.convolution = th.nn.Conv2d(channels, 4, kernel_size=12, stride=8)
        self.linear = th.nn.Linear(4 * ((height - 12) // 8 + 1) * ((width - 12) // 8 + 1), 16)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return self.linear(th.relu(self.convolution(observations)).flatten(1))  # type: ignore[no-any-return]
