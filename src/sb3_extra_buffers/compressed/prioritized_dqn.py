"""DQN that learns most from what surprises it most."""

from __future__ import annotations

import warnings

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN
from torch.nn import functional as F  # noqa: N812

from sb3_extra_buffers.compressed.prioritized_buffer import (
    CompressedDictPrioritizedReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    PrioritizedReplayBufferSamples,
)
from sb3_extra_buffers.errors import ConfigurationError


class PrioritizedDQN(DQN):
    """SB3's ``DQN`` with prioritized replay: same arguments, except that the replay buffer has to have priorities.

    Without a ``replay_buffer_class``, that is :class:`CompressedPrioritizedReplayBuffer` or its Dict variant, which
    ``replay_buffer_kwargs`` go to (``alpha``, ``beta``, ``compression_method``...), and ``n_steps`` too.
    """

    replay_buffer: CompressedPrioritizedReplayBuffer

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """As ``DQN`` does, with weights in the loss, and errors reported back to the buffer."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        self.replay_buffer.progress_remaining = self._current_progress_remaining
        losses = []
        for _ in range(gradient_steps):
            batch = self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)
            values, targets = self._values_and_targets(batch)
            loss = (batch.weights * F.smooth_l1_loss(values, targets, reduction="none")).mean()
            losses.append(loss.item())
            self.policy.optimizer.zero_grad()
            loss.backward()
            th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            self.replay_buffer.update_priorities(batch.indices, targets - values)
        self._n_updates += gradient_steps
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/loss", np.mean(losses))
        self.logger.record("train/beta", self.replay_buffer.beta)

    def _values_and_targets(self, batch: PrioritizedReplayBufferSamples) -> tuple[th.Tensor, th.Tensor]:
        discounts = self.gamma if batch.discounts is None else batch.discounts
        with th.no_grad():
            next_values = self.q_net_target(batch.next_observations).max(dim=1, keepdim=True).values
            targets = batch.rewards + (1 - batch.dones) * discounts * next_values
        return self.q_net(batch.observations).gather(1, batch.actions.long()), targets

    def _setup_model(self) -> None:
        if self.replay_buffer_class is None:
            is_dict = isinstance(self.observation_space, spaces.Dict)
            self.replay_buffer_class = (
                CompressedDictPrioritizedReplayBuffer if is_dict else CompressedPrioritizedReplayBuffer
            )
        if not hasattr(self.replay_buffer_class, "update_priorities"):
            raise ConfigurationError(
                f"{self.replay_buffer_class.__name__} has no priorities. Use CompressedPrioritizedReplayBuffer, "
                "CompressedDictPrioritizedReplayBuffer, or leave out replay_buffer_class."
            )
        if self.n_steps > 1:
            self.replay_buffer_kwargs = {"n_steps": self.n_steps, "gamma": self.gamma, **self.replay_buffer_kwargs}
        with warnings.catch_warnings():
            # SB3 thinks that no buffer but its own knows n_steps. The buffer checks that it does.
            warnings.filterwarnings("ignore", message="`n_steps=")
            super()._setup_model()
