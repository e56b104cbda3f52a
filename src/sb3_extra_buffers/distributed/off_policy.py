"""Off-policy algorithms as learners: they train while collectors send segments to their replay buffer."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import RolloutReturn, TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.vec_env import VecEnv

from sb3_extra_buffers.compressed.nstep_buffer import CompressedDictNStepReplayBuffer, CompressedNStepReplayBuffer
from sb3_extra_buffers.compressed.prioritized_buffer import (
    CompressedDictPrioritizedReplayBuffer,
    CompressedPrioritizedReplayBuffer,
)
from sb3_extra_buffers.compressed.prioritized_dqn import PrioritizedDQN
from sb3_extra_buffers.distributed.buffer import ShardedReplayBuffer
from sb3_extra_buffers.distributed.collector import weights_of
from sb3_extra_buffers.distributed.learner import Learner
from sb3_extra_buffers.distributed.parts import default_part_class
from sb3_extra_buffers.errors import ConfigurationError, EmptyBufferError

logger = logging.getLogger(__name__)


class OffPolicyLearner(Learner, OffPolicyAlgorithm):
    """What ``distributed()`` adds to an off-policy algorithm."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._steps_due = 0.0
        """Steps to consume before the model is trained again. A fraction is left for the next time."""
        self._published_at = 0
        """The number of gradient steps when weights were last published."""
        super().__init__(*args, **kwargs)

    def _setup_model(self) -> None:
        if self.collectors is not None:
            self.replay_buffer_kwargs = dict(self.replay_buffer_kwargs)
            if self.replay_buffer_class is None:
                self.replay_buffer_class = ShardedReplayBuffer
                self._set_n_steps()
            if not issubclass(self.replay_buffer_class, ShardedReplayBuffer):
                raise ConfigurationError(
                    "Collectors need replay_buffer_class=ShardedReplayBuffer, not "
                    f"{self.replay_buffer_class.__name__}. Pass that class as buffer_class in replay_buffer_kwargs."
                )
            self._refuse_normalization()
            self.n_envs = self.collectors["envs"]
            self.replay_buffer_kwargs["parts"] = self.collectors["n"]
            if isinstance(self, PrioritizedDQN) and "buffer_class" not in self.replay_buffer_kwargs:
                self.replay_buffer_kwargs["buffer_class"] = self._prioritized_class()
            if self.replay_buffer_kwargs.get("placement") == "shards":
                self.replay_buffer_kwargs.setdefault("ray", self.ray)
        with warnings.catch_warnings():
            if self.replay_buffer_kwargs.get("n_steps", 1) == getattr(self, "n_steps", 1):
                # SB3 warns that a custom buffer does not get n_steps. This one has got it.
                warnings.filterwarnings("ignore", message="`n_steps=")
            super()._setup_model()

    def _set_n_steps(self) -> None:
        """Like SB3, use the ``n_steps`` of the algorithm for the default buffer."""
        n_steps = getattr(self, "n_steps", 1)  # SB3 2.7 has no such argument
        if n_steps > 1 and not isinstance(self, PrioritizedDQN):  # which does that itself
            is_dict = isinstance(self.observation_space, spaces.Dict)
            part_class = CompressedDictNStepReplayBuffer if is_dict else CompressedNStepReplayBuffer
            options = {"buffer_class": part_class, "n_steps": n_steps, "gamma": self.gamma}
            self.replay_buffer_kwargs = {**options, **self.replay_buffer_kwargs}

    def _prioritized_class(self) -> type[CompressedPrioritizedReplayBuffer]:
        is_dict = isinstance(self.observation_space, spaces.Dict)
        return CompressedDictPrioritizedReplayBuffer if is_dict else CompressedPrioritizedReplayBuffer

    def _collector_options(self) -> dict[str, Any]:
        """The arguments of the collectors' algorithms that override those of the learner."""
        assert self.collectors is not None
        options = self.replay_buffer_kwargs
        names: tuple[str, ...] = ("handle_timeout_termination",)
        buffer_class = default_part_class(self.observation_space)  # enough to collect steps and to export them
        if issubclass(options.get("buffer_class", ReplayBuffer), CompressedPrioritizedReplayBuffer):
            buffer_class = self._prioritized_class()
            names += ("alpha", "epsilon", "n_steps", "gamma")  # for the initial priorities of transitions
        given = {name: options[name] for name in names if name in options}
        return {
            "buffer_size": 2 * self.collectors["segment_steps"] * self.collectors["envs"],
            "replay_buffer_class": buffer_class,
            "replay_buffer_kwargs": {**given, **(self.collectors["buffer_kwargs"] or {})},
            "learning_starts": self.learning_starts,
        }

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        train_freq: TrainFreq,
        replay_buffer: Any,
        action_noise: Any = None,
        learning_starts: int = 0,
        log_interval: int | None = None,
    ) -> RolloutReturn:
        if self.collectors is None:
            return super().collect_rollouts(
                env, callback, train_freq, replay_buffer, action_noise, learning_starts, log_interval
            )
        self.policy.set_training_mode(False)
        is_new = self._intake is None
        intake = self._intake or self._start_intake(
            replay_buffer, self._collector_options(), self.collectors["segment_steps"], self.collectors["ahead"]
        )
        if is_new or self._n_updates - self._published_at >= self.collectors["sync_every"]:
            intake.publish(weights_of(self))
            self._published_at = self._n_updates
        callback.on_rollout_start()
        n_steps = n_episodes = 0
        self._steps_due += self._steps_per_training(train_freq)
        while self._steps_due >= 1:
            self._steps_due -= 1
            step = intake.next_step(self.num_timesteps, self._total_timesteps)
            self.num_timesteps += self.n_envs
            n_steps += 1
            callback.update_locals({"self": self, "infos": step.infos, "dones": step.dones, "rewards": step.rewards})
            if not callback.on_step():
                return RolloutReturn(n_steps * self.n_envs, n_episodes, continue_training=False)
            self._update_info_buffer(step.infos, step.dones)
            self._update_current_progress_remaining(self.num_timesteps, self._total_timesteps)
            self._on_step()
            for _ in range(int(step.dones.sum())):
                n_episodes += 1
                self._episode_num += 1
                if log_interval is not None and self._episode_num % log_interval == 0:
                    self.dump_logs()
        callback.on_rollout_end()
        # With gradient_steps=-1, SB3 makes as many gradient steps as these.
        return RolloutReturn(train_freq.frequency * self.n_envs, n_episodes, continue_training=True)

    def train(self, gradient_steps: int, *args: Any, **kwargs: Any) -> None:
        """Train as the algorithm does, unless the buffer is empty because shards have died."""
        try:
            super().train(gradient_steps, *args, **kwargs)
        except EmptyBufferError:
            if not getattr(self.replay_buffer, "shard_statistics", {}).get("transitions_lost"):
                raise
            logger.warning("All transitions were lost with their shards. Training goes on once there are new ones.")

    def _steps_per_training(self, train_freq: TrainFreq) -> float:
        """How many steps are consumed before the model is trained again."""
        assert self.collectors is not None
        if train_freq.unit != TrainFrequencyUnit.STEP:
            raise ConfigurationError("Collectors need a train_freq in steps, not in episodes.")
        ratio = self.collectors["samples_per_insert"]
        if ratio is None or self.num_timesteps < self.learning_starts:
            return float(train_freq.frequency)
        gradient_steps = self.gradient_steps if self.gradient_steps > 0 else train_freq.frequency * self.n_envs
        return float(self.batch_size * gradient_steps / ratio / self.n_envs)

    def dump_logs(self) -> None:
        self._record_collectors()
        for name, value in getattr(self.replay_buffer, "shard_statistics", {}).items():
            self.logger.record(f"shards/{name}", value)
        super().dump_logs()
