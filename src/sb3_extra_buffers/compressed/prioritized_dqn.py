"""DQN with prioritized experience replay."""

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
    """SB3's ``DQN`` with prioritized replay: same arguments, but the replay buffer must have priorities.

    The default ``replay_buffer_class`` is :class:`CompressedPrioritizedReplayBuffer` or its Dict variant. It gets
    ``replay_buffer_kwargs`` (``alpha``, ``beta``, ``compression_method``...), and the ``n_steps`` of the algorithm.
    """

    replay_buffer: CompressedPrioritizedReplayBuffer

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Train like ``DQN``, but weight the loss by importance sampling, and update priorities from the TD errors."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        self.replay_buffer.progress_remaining = self._current_progress_remaining
        losses = th.zeros(gradient_steps, device=self.device)  # item() in every step would wait for the GPU
        for step in range(gradient_steps):
            batch = self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)
            values, targets = self._values_and_targets(batch)
            loss = (batch.weights * F.smooth_l1_loss(values, targets, reduction="none")).mean()
            losses[step] = loss.detach()
            self.policy.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # of torch
            th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            self.replay_buffer.update_priorities(batch.indices, targets - values)
        self._n_updates += gradient_steps
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/loss", np.mean(losses.tolist()))
        self.logger.record("train/beta", self.replay_buffer.beta)

    def td_errors(self, batch: PrioritizedReplayBufferSamples) -> th.Tensor:
        """The TD errors of a batch, without gradients."""
        with th.no_grad():
            values, targets = self._values_and_targets(batch)
        return targets - values

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
            if self.replay_buffer_kwargs["n_steps"] != self.n_steps:
                raise ConfigurationError(
                    f"{type(self).__name__} was given n_steps={self.n_steps}, but its replay_buffer_kwargs say "
                    f"{self.replay_buffer_kwargs['n_steps']}. Leave n_steps out of replay_buffer_kwargs."
                )
        with warnings.catch_warnings():
            # SB3 warns that custom buffers do not get n_steps. This one does, see above.
            warnings.filterwarnings("ignore", message="`n_steps=")
            super()._setup_model()
        part_class = getattr(self.replay_buffer, "part_class", None)  # of a ShardedReplayBuffer
        if part_class is not None and not hasattr(part_class, "update_priorities"):
            raise ConfigurationError(
                f"The parts of the {type(self.replay_buffer).__name__} have no priorities: each is a "
                f'{part_class.__name__}. Pass replay_buffer_kwargs={{"buffer_class": '
                "CompressedPrioritizedReplayBuffer}, or CompressedDictPrioritizedReplayBuffer for Dict observations."
            )
