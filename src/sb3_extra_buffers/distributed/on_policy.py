"""On-policy algorithms as learners: each collector collects a part of every rollout, all with the same weights."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from sb3_extra_buffers.distributed.collector import weights_of
from sb3_extra_buffers.distributed.intake import joined
from sb3_extra_buffers.distributed.learner import Learner
from sb3_extra_buffers.distributed.rollouts import ShardedDictRolloutBuffer, ShardedRolloutBuffer
from sb3_extra_buffers.errors import ConfigurationError

_BATCH_WARNING = "You have specified a mini-batch size"


class OnPolicyLearner(Learner, OnPolicyAlgorithm):
    """What ``distributed()`` adds to an on-policy algorithm."""

    rollout_buffer_class: Any
    _unused_options: ClassVar[tuple[str, ...]] = ("segment_steps", "ahead", "samples_per_insert", "sync_every")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            if kwargs.get("collectors") is not None:
                # PPO would check its batch size for a rollout of the learner's own environments, which are not stepped.
                warnings.filterwarnings("ignore", message=_BATCH_WARNING)
            super().__init__(*args, **kwargs)
        if self.collectors is None:
            return
        n_transitions, batch_size = self.n_steps * self.n_envs, getattr(self, "batch_size", None)
        if batch_size and n_transitions % batch_size:
            warnings.warn(
                f"{_BATCH_WARNING} of {batch_size}, but a rollout has n_steps * n * envs = {n_transitions} "
                f"transitions, so the last batch of every epoch has only {n_transitions % batch_size}.",
                stacklevel=2,
            )

    def _setup_model(self) -> None:
        if self.collectors is not None:
            self._refuse_normalization()
            is_dict = isinstance(self.observation_space, spaces.Dict)
            sharded = ShardedDictRolloutBuffer if is_dict else ShardedRolloutBuffer
            if self.rollout_buffer_class not in (None, sharded.part_class, sharded):
                raise ConfigurationError(
                    f"Collectors send rollouts of {sharded.part_class.__name__}: pass it as "
                    f"rollout_buffer_class, or nothing, not {self.rollout_buffer_class.__name__}."
                )
            self.rollout_buffer_class = sharded
            self.n_envs = self.collectors["n"] * self.collectors["envs"]
            self.rollout_buffer_kwargs = {**self.rollout_buffer_kwargs, "parts": self.collectors["n"]}
        super()._setup_model()

    def _collector_options(self) -> dict[str, Any]:
        """The arguments of the collectors' algorithms that override those of the learner."""
        assert self.collectors is not None
        options = {name: value for name, value in self.rollout_buffer_kwargs.items() if name != "parts"}
        return {
            "n_steps": self.n_steps,
            "rollout_buffer_class": self.rollout_buffer_class.part_class,
            "rollout_buffer_kwargs": {**options, **(self.collectors["buffer_kwargs"] or {})},
        }

    def collect_rollouts(self, env: VecEnv, callback: BaseCallback, rollout_buffer: Any, n_rollout_steps: int) -> bool:
        if self.collectors is None:
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        self.policy.set_training_mode(False)
        intake = self._intake or self._start_intake(rollout_buffer, self._collector_options(), self.n_steps, ahead=1)
        intake.publish(weights_of(self))
        rollout_buffer.reset()
        callback.on_rollout_start()
        parts = intake.next_rollout(self.num_timesteps, self._total_timesteps)
        rollout_buffer.join()
        seen = {"self": self, "rollout_buffer": rollout_buffer, "n_rollout_steps": n_rollout_steps}
        for n_steps, step in enumerate(map(joined, zip(*parts, strict=True))):
            self.num_timesteps += self.n_envs
            fields = {
                "actions": rollout_buffer.actions[n_steps].reshape(self.n_envs, *(self.action_space.shape or ())),
                "values": th.from_numpy(rollout_buffer.values[n_steps]).reshape(-1, 1),
                "log_probs": th.from_numpy(rollout_buffer.log_probs[n_steps]),
            }
            callback.update_locals({**seen, "n_steps": n_steps, **step._asdict(), **fields})
            if not callback.on_step():
                return False
            self._update_info_buffer(step.infos, step.dones)
        callback.on_rollout_end()
        return True

    def dump_logs(self, iteration: int = 0) -> None:
        self._record_collectors()
        super().dump_logs(iteration)
