"""SB3's off-policy algorithms as learners whose experience comes from collectors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import RolloutReturn, TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.vec_env import VecEnv

from sb3_extra_buffers.compressed.prioritized_buffer import (
    CompressedDictPrioritizedReplayBuffer,
    CompressedPrioritizedReplayBuffer,
)
from sb3_extra_buffers.compressed.replay_buffer import CompressedDictReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.distributed.buffer import ShardedReplayBuffer
from sb3_extra_buffers.distributed.collector import CollectorPlan, weights_of
from sb3_extra_buffers.distributed.intake import Intake, Statistics
from sb3_extra_buffers.distributed.transport import LocalTransport, Transport
from sb3_extra_buffers.errors import ArgumentError, ConfigurationError

_DEFAULTS: dict[str, Any] = {
    "n": 2,
    "envs": 1,
    "make_env": None,
    "segment_steps": 32,
    "ahead": 2,
    "samples_per_insert": None,
    "sync_every": 100,
    "algorithm_kwargs": None,
    "buffer_kwargs": None,
    "actor_options": None,
    "in_process": False,
}
_OF_LEARNER = ("policy", "env", "collectors", "ray", "_init_setup_model")


class _Distributed(OffPolicyAlgorithm):
    """What :func:`distributed` adds to an algorithm."""

    collectors: dict[str, Any] | None
    _algorithm: type[OffPolicyAlgorithm]

    def __init__(
        self,
        policy: Any,
        env: Any,
        *args: Any,
        collectors: Mapping[str, Any] | None = None,
        ray: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        bound = inspect.signature(self._algorithm.__init__).bind_partial(None, policy, env, *args, **kwargs).arguments
        given = {name: value for name, value in list(bound.items())[1:] if name not in _OF_LEARNER}
        self.ray = dict(ray or {})
        self.collectors = None if collectors is None else _checked(collectors, env)
        # SB3 changes policy_kwargs.
        self._collector_arguments = {**given, "policy": policy, "policy_kwargs": dict(given.get("policy_kwargs") or {})}
        self._intake: Intake | None = None
        self.collector_statistics: Statistics | None = None
        """Of the current or the last call of ``learn``."""
        self._steps_due = 0.0
        super().__init__(policy, env, *args, **kwargs)

    def _setup_model(self) -> None:
        if self.collectors is not None:
            if self.replay_buffer_class is None:
                self.replay_buffer_class = ShardedReplayBuffer
            if not issubclass(self.replay_buffer_class, ShardedReplayBuffer):
                raise ConfigurationError(
                    "Collectors need replay_buffer_class=ShardedReplayBuffer, not "
                    f"{self.replay_buffer_class.__name__}. Pass that class as buffer_class in replay_buffer_kwargs."
                )
            if self._vec_normalize_env is not None:
                raise ConfigurationError(
                    "Collectors have environments of their own, so the statistics of a VecNormalize of the learner "
                    "would not change. Normalize observations in make_env."
                )
            self.n_envs = self.collectors["envs"]
            self.replay_buffer_kwargs = {**self.replay_buffer_kwargs, "parts": self.collectors["n"]}
        super()._setup_model()

    def learn(self, *args: Any, **kwargs: Any) -> Any:
        if self.collectors is None:
            return super().learn(*args, **kwargs)
        try:
            return super().learn(*args, **kwargs)
        finally:
            if self._intake is not None:
                self._intake.stop()
                self._intake = None

    def _start_intake(self) -> Intake:
        options = self.collectors
        assert options is not None
        assert isinstance(self.replay_buffer, ShardedReplayBuffer)
        transport: Transport
        if options["in_process"]:
            transport = LocalTransport()
        else:
            from sb3_extra_buffers.distributed.ray_transport import RayTransport

            transport = RayTransport(self.ray, options["actor_options"])
        plan = CollectorPlan(
            self._algorithm,
            _collector_arguments(self._collector_arguments, options["algorithm_kwargs"]),
            options["make_env"],
            options["envs"],
            options["segment_steps"],
            self.learning_starts,
            _collector_buffer_class(self.replay_buffer),
            dict(options["buffer_kwargs"] or {}),
        )
        intake = Intake(transport, self.replay_buffer, self.seed, options["ahead"])
        self.collector_statistics = intake.statistics
        intake.start(plan, weights_of(self))
        self._published_at = self._n_updates
        return intake

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
        if self._intake is None:
            self._intake = self._start_intake()
        intake, options = self._intake, self.collectors
        self.policy.set_training_mode(False)
        if self._n_updates - self._published_at >= options["sync_every"]:
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
                    self._record(intake)
                    self.dump_logs()
        callback.on_rollout_end()
        return RolloutReturn(n_steps * self.n_envs, n_episodes, continue_training=True)

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

    def _record(self, intake: Intake) -> None:
        """What has happened on the way, as scalars for the logger."""
        statistics = intake.statistics
        for name, value in statistics.scalars().items():
            self.logger.record(f"collectors/{name}", value)
        self.logger.record("collectors/steps_waiting", intake.n_waiting)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_intake"]


def distributed(algorithm: type[OffPolicyAlgorithm]) -> Any:
    """The class of a learner: ``algorithm`` with two arguments more, ``collectors`` and ``ray``.

    ``collectors`` is a dict:

    - ``n``: how many collectors there are, each in a process of its own (2).
    - ``envs``: how many environments each of them has (1).
    - ``make_env``: a function that returns an environment, or a ``VecEnv`` with ``envs`` of them. Not needed if ``env``
      is the name of an environment.
    - ``segment_steps``: after how many steps a collector sends what it has collected (32).
    - ``ahead``: how many segments a collector may collect before the learner has consumed the first of them (2).
    - ``samples_per_insert``: how often a transition is sampled on average. By default, ``train_freq``,
      ``gradient_steps`` and ``batch_size`` decide, as without collectors.
    - ``sync_every``: after how many gradient steps collectors get new weights (100).
    - ``algorithm_kwargs``: arguments of the algorithm that are different for collectors, such as another exploration.
    - ``buffer_kwargs``: options of the collectors' buffers, such as ``compression_method``.
    - ``actor_options``: options of ``ray.remote`` for collectors. By default, each takes one CPU of a cluster. On this
      machine, they share the CPUs.
    - ``in_process``: True runs the collectors in this process, one after the other, without Ray. For tests.

    ``ray`` has arguments for ``ray.init``, such as ``{"address": "auto"}``. Without an address, Ray is started on this
    machine. Without ``collectors``, the class is ``algorithm`` itself.
    """
    if OffPolicyAlgorithm not in getattr(algorithm, "__mro__", ()):
        raise ConfigurationError(
            f"distributed() is for off-policy algorithms of SB3, such as DQN and SAC, not for {algorithm!r}."
        )
    return _learner_class(algorithm)


@functools.cache
def _learner_class(algorithm: type[OffPolicyAlgorithm]) -> type[OffPolicyAlgorithm]:
    name = f"Distributed{algorithm.__name__}"
    return type(name, (_Distributed, algorithm), {"_algorithm": algorithm, "__doc__": algorithm.__doc__})


def _checked(collectors: Mapping[str, Any], env: Any) -> dict[str, Any]:
    if unknown := sorted(collectors.keys() - _DEFAULTS.keys()):
        raise ArgumentError(f"collectors has no option {unknown[0]!r}. There are: {', '.join(_DEFAULTS)}.")
    options = {**_DEFAULTS, **collectors}
    for name in ("n", "envs", "segment_steps", "ahead", "sync_every"):
        if not isinstance(options[name], int) or options[name] < 1:
            raise ConfigurationError(f"{name} of collectors must be a number from 1 on, not {options[name]!r}.")
    ratio = options["samples_per_insert"]
    if ratio is not None and not ratio > 0:
        raise ConfigurationError(f"samples_per_insert must be above 0, not {ratio!r}.")
    if options["make_env"] is None:
        if not isinstance(env, str):
            raise ConfigurationError(
                "Collectors need a function that makes their environments: pass make_env in collectors."
            )
        options["make_env"] = partial(gym.make, env)
    return options


def _collector_buffer_class(buffer: ShardedReplayBuffer) -> type[CompressedReplayBuffer]:
    """The simplest class with which the algorithm can be created."""
    is_dict = isinstance(buffer.observation_space, spaces.Dict)
    if isinstance(buffer.parts[0], CompressedPrioritizedReplayBuffer):
        return CompressedDictPrioritizedReplayBuffer if is_dict else CompressedPrioritizedReplayBuffer
    return CompressedDictReplayBuffer if is_dict else CompressedReplayBuffer


def _collector_arguments(arguments: Mapping[str, Any], different: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of the algorithm, without those that only the learner's buffer has."""
    of_buffer = ("buffer_size", "replay_buffer_class", "replay_buffer_kwargs", "optimize_memory_usage", "n_steps")
    return {**{name: value for name, value in arguments.items() if name not in of_buffer}, **(different or {})}
