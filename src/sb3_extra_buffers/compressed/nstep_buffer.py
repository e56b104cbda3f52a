"""Replay buffers with n-step returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize
from typing_extensions import Unpack

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compressed.arguments import StorageOptions
from sb3_extra_buffers.compressed.replay_buffer import CompressedDictReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError


class CompressedNStepReplayBuffer(CompressedReplayBuffer, NStepReplayBuffer):
    """SB3's ``NStepReplayBuffer`` with compressed observations: same arguments, same batches under the same seed.

    Unlike SB3's, it allows ``optimize_memory_usage``.

    Further arguments: see :class:`~sb3_extra_buffers.compressed.base.BaseCompressedBuffer`.

    SB3 passes neither ``n_steps`` nor ``gamma`` of the algorithm to a buffer class that you choose, so pass both in
    ``replay_buffer_kwargs``.

    :param n_steps: The number of rewards in a return. It has fewer at the end of an episode and at the newest step.
    :param gamma: The discount factor of the algorithm.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int = 3,
        gamma: float = 0.99,
        **options: Unpack[StorageOptions],
    ) -> None:
        if n_steps < 1:
            raise ConfigurationError(f"n_steps must be at least 1, not {n_steps}.")
        of_sb3: dict[str, Any] = {"n_steps": n_steps, "gamma": gamma}
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            **options,
            **of_sb3,
        )

    def _samples_at(
        self, slots: Indices, envs: Indices, env: VecNormalize | None, last_slots: Indices | None = None
    ) -> Any:
        # Not SB3's method: it draws environments itself, decodes twice, and changes `timeouts` while it samples.
        window = (slots[:, None] + np.arange(self.n_steps)) % self.buffer_size, envs[:, None]
        # Returns stop at the newest transition: the slot after it holds the oldest one.
        is_last = (window[0] == (self.pos - 1) % self.buffer_size) | self._has_ended(window)
        n_rewards = n_until(is_last)
        rewards = self._normalize_reward(self.rewards[window], env)
        returns, discounts = n_step_returns(rewards, n_rewards, self.gamma)
        samples = super()._samples_at(slots, envs, env, (slots + n_rewards - 1) % self.buffer_size)
        return samples._replace(rewards=self.to_torch(returns), discounts=self.to_torch(discounts))


def n_until(is_last: npt.NDArray[np.bool_]) -> Indices:
    """Count the rewards in each return, given which of its n_steps must be the last one. Changes ``is_last``."""
    is_last[:, -1] = True
    n_rewards: Indices = is_last.argmax(axis=1) + 1
    return n_rewards


def n_step_returns(
    rewards: npt.NDArray[Any], n_rewards: Indices, gamma: float
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Compute returns and discounts, both (n, 1), from the first ``n_rewards`` of (n, n_steps) rewards."""
    steps, n_rewards = np.arange(rewards.shape[1]), n_rewards[:, None]
    powers = gamma ** steps.astype(np.float32)
    returns = (rewards * powers * (steps < n_rewards)).sum(axis=1, keepdims=True)
    return returns, gamma ** n_rewards.astype(np.float32)


class CompressedDictNStepReplayBuffer(CompressedNStepReplayBuffer, CompressedDictReplayBuffer):
    """:class:`CompressedNStepReplayBuffer` for Dict observation spaces. SB3 has no such buffer."""
