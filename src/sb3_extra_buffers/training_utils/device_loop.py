"""Training loops that stay on the device: ``on_device(PPO)`` and ``on_device(DQN)``.

SB3 copies observations, actions and rewards between device and host in every step. With environments that run on the
device (:class:`~sb3_extra_buffers.training_utils.device_env.DeviceVecEnv`) and a buffer that keeps observations there,
no copy is needed. Only ``collect_rollouts`` is replaced. Under the same seed, it leads to the same weights as SB3's.

The host only needs to know when episodes end: for statistics, and to bootstrap after a time limit. These few numbers
are copied to the host in the background, and used some steps later.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import RolloutReturn, TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.vec_env import VecEnv
from torch.distributions import Distribution

from sb3_extra_buffers.compressed.rows import map_parts, parts_at
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.gpu_buffers import GpuDictReplayBuffer, GpuDictRolloutBuffer, GpuReplayBuffer, GpuRolloutBuffer
from sb3_extra_buffers.gpu_buffers.transfer import Report, upload
from sb3_extra_buffers.training_utils.device_env import DeviceVecEnv, Observations, TrackedStep

MAX_PENDING = 8
"""The most steps whose summary may still be on its way to the host. Beyond it, the host waits for the oldest one. This
bounds the memory of their terminal observations, which are kept until then."""

Algorithm = TypeVar("Algorithm", bound=type)


def on_device(algorithm: Algorithm) -> Algorithm:
    """A subclass of SB3's ``PPO``, ``A2C`` or ``DQN`` that collects experience without copies to the host.

    Use it like the algorithm itself, with a :class:`DeviceVecEnv`. By default, its buffer is ``GpuRolloutBuffer`` or
    ``GpuReplayBuffer``. Callbacks find tensors in ``self.locals``, and no ``infos``.
    """
    return _subclass(algorithm)  # type: ignore[no-any-return]


@functools.cache
def _subclass(algorithm: type) -> Any:
    collect = getattr(algorithm, "collect_rollouts", None)
    loop: type
    if collect is OnPolicyAlgorithm.collect_rollouts:
        loop = _OnPolicyLoop
    elif collect is OffPolicyAlgorithm.collect_rollouts and "exploration_fraction" in signature(algorithm).parameters:
        loop = _OffPolicyLoop
    else:
        name = getattr(algorithm, "__name__", algorithm)
        raise ConfigurationError(f"on_device() is for PPO, A2C, DQN and classes derived from these, not for {name}.")
    return type(f"OnDevice{algorithm.__name__}", (loop, algorithm), {"__module__": __name__, "__doc__": loop.__doc__})


class _Loop:
    """What both loops share. Among the bases of an algorithm, it comes before SB3's class."""

    _buffer_argument: str
    _buffer_classes: tuple[type, type]
    """The default buffer class, and the one for Dict spaces."""

    def _setup_model(self: Any) -> None:
        self._pending_summaries: deque[tuple[Report, int, Observations]] = deque()
        if getattr(self, self._buffer_argument) is None:
            is_dict = isinstance(self.observation_space, spaces.Dict)
            setattr(self, self._buffer_argument, self._buffer_classes[is_dict])
        super()._setup_model()  # type: ignore[misc]

    def _excluded_save_params(self: Any) -> list[str]:
        # Environments are not saved, so nothing needs the last observation. It may be on a GPU that the loading
        # machine does not have.
        last = ["_last_obs", "_last_original_obs", "_last_episode_starts", "_pending_summaries"]
        return [*super()._excluded_save_params(), *last]  # type: ignore[misc]

    def _checked_env(self: Any, env: VecEnv, buffer: Any) -> DeviceVecEnv:
        if not isinstance(env, DeviceVecEnv):
            raise ConfigurationError(
                f"A {type(env).__name__} cannot stay on the device: pass a DeviceVecEnv, without wrappers."
            )
        if not isinstance(buffer, self._buffer_classes):
            one, other = (cls.__name__ for cls in self._buffer_classes)
            raise ConfigurationError(f"A {type(buffer).__name__} copies to the host: use {one} or {other}.")
        if env.device.type != self.device.type:
            raise ConfigurationError(f"The environment is on {env.device}, but the policy is on {self.device}.")
        return env

    def _last_tensors(self: Any) -> Observations:
        """The last observations as tensors. After a reset, SB3 holds them as arrays."""
        return map_parts(lambda part: th.as_tensor(part, device=self.device), self._last_obs)

    def _send_summary(self: Any, tracked: TrackedStep, number: int) -> None:
        report = Report(tracked.summary)
        report.request()
        self._pending_summaries.append((report, number, tracked.step.final_obs))

    def _arrived_summaries(
        self: Any, everything: bool = False
    ) -> Iterator[tuple[npt.NDArray[np.float32], int, Observations]]:
        """Summaries of steps that have arrived on the host, in order, each with the number of its step and the
        observations before any reset. With ``everything``, the host waits for all of them.
        """
        waiting = self._pending_summaries
        while waiting and (everything or len(waiting) > MAX_PENDING or waiting[0][0].has_arrived):
            report, number, final_obs = waiting.popleft()
            yield report.wait(), number, final_obs


class _OnPolicyLoop(_Loop):
    """An on-policy algorithm that collects rollouts on the device."""

    _buffer_argument = "rollout_buffer_class"
    _buffer_classes = (GpuRolloutBuffer, GpuDictRolloutBuffer)

    def collect_rollouts(
        self: Any, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        device_env: DeviceVecEnv = self._checked_env(env, rollout_buffer)
        self.policy.set_training_mode(False)
        self._pending_summaries.clear()
        self._terminal_values: list[tuple[int, int, th.Tensor]] = []
        rollout_buffer.reset()
        if self.use_sde:
            self.policy.reset_noise(env.num_envs)
        infos: list[dict[str, Any]] = [{}] * env.num_envs
        obs, starts = self._last_tensors(), th.as_tensor(self._last_episode_starts, device=self.device)
        dones = starts
        callback.on_rollout_start()

        for n_steps in range(n_rollout_steps):
            if self.use_sde and self.sde_sample_freq > 0 and n_steps % self.sde_sample_freq == 0:
                self.policy.reset_noise(env.num_envs)
            with th.no_grad(), unvalidated_distributions():
                actions, values, log_probs = self.policy(obs)
                clipped_actions = self._for_env(actions)
                tracked = device_env.step_tensors(clipped_actions)
            new_obs, rewards, dones = tracked.step.obs, tracked.step.rewards, tracked.dones
            self.num_timesteps += env.num_envs
            callback.update_locals(locals())
            if not callback.on_step():
                self._process_summaries(device_env, everything=True)
                return False
            self._send_summary(tracked, n_steps)
            self._process_summaries(device_env)
            rollout_buffer.add(obs, actions, rewards, starts, values, log_probs)  # type: ignore[arg-type]
            self._last_obs, self._last_episode_starts = obs, starts = new_obs, dones

        with th.no_grad():
            values = self.policy.predict_values(obs)
        self._process_summaries(device_env, everything=True)
        self._add_terminal_values(rollout_buffer)
        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones.cpu().numpy())
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def _for_env(self: Any, actions: th.Tensor) -> th.Tensor:
        """Actions within the bounds of the action space, as the environment expects them."""
        if isinstance(self.action_space, spaces.Box):
            low, high = self._bounds
            squashed = self.policy.squash_output
            actions = low + 0.5 * (actions + 1.0) * (high - low) if squashed else actions.clamp(low, high)
        return actions

    @functools.cached_property
    def _bounds(self: Any) -> tuple[th.Tensor, th.Tensor]:
        space = self.action_space
        return th.as_tensor(space.low, device=self.device), th.as_tensor(space.high, device=self.device)

    def _excluded_save_params(self: Any) -> list[str]:
        return [*super()._excluded_save_params(), "_bounds", "_terminal_values"]

    def _process_summaries(self: Any, env: DeviceVecEnv, everything: bool = False) -> None:
        """Record episodes that have ended, and the values of the last observations before time limits."""
        for summary, number, final_obs in self._arrived_summaries(everything):
            self.ep_info_buffer.extend(env.episodes(summary).values())
            for i in np.flatnonzero(summary[1]).tolist():
                # One by one, as SB3 does: with another batch size, the network's output may differ in the last bits.
                with th.no_grad():
                    value = self.policy.predict_values(parts_at(final_obs, slice(i, i + 1)))
                self._terminal_values.append((number, i, self.gamma * value.reshape(())))

    def _add_terminal_values(self: Any, rollout_buffer: RolloutBuffer) -> None:
        """Bootstrap the rewards of the steps that a time limit ended."""
        if self._terminal_values:
            steps, envs, values = zip(*self._terminal_values, strict=True)
            rollout_buffer.rewards[steps, envs] += th.stack(values).cpu().numpy()


class _OffPolicyLoop(_Loop):
    """An epsilon-greedy algorithm that collects transitions on the device."""

    _buffer_argument = "replay_buffer_class"
    _buffer_classes = (GpuReplayBuffer, GpuDictReplayBuffer)

    def collect_rollouts(
        self: Any,
        env: VecEnv,
        callback: BaseCallback,
        train_freq: TrainFreq,
        replay_buffer: ReplayBuffer,
        action_noise: Any = None,
        learning_starts: int = 0,
        log_interval: int | None = None,
    ) -> RolloutReturn:
        device_env: DeviceVecEnv = self._checked_env(env, replay_buffer)
        if train_freq.unit != TrainFrequencyUnit.STEP:
            raise ConfigurationError("On a device, train_freq must be a number of steps, not of episodes.")
        if action_noise is not None:
            raise ConfigurationError("action_noise is for continuous actions, which are not supported on a device.")
        self.policy.set_training_mode(False)
        infos: list[dict[str, Any]] = [{}] * env.num_envs
        obs = self._last_tensors()
        callback.on_rollout_start()
        n_episodes = self._episode_num
        for n_steps in range(1, train_freq.frequency + 1):
            actions = self._choose_actions(obs, learning_starts)
            tracked = device_env.step_tensors(actions)
            new_obs, rewards, dones = tracked.step.obs, tracked.step.rewards, tracked.dones
            self.num_timesteps += env.num_envs
            callback.update_locals(locals())
            if not callback.on_step():
                self._process_summaries(device_env, log_interval, everything=True)
                return RolloutReturn(n_steps * env.num_envs, self._episode_num - n_episodes, continue_training=False)
            timeouts = {"TimeLimit.truncated": tracked.summary[1]}
            replay_buffer.add(obs, tracked.step.final_obs, actions, rewards, dones, timeouts)  # type: ignore[arg-type]
            self._last_obs = obs = new_obs
            self._update_current_progress_remaining(self.num_timesteps, self._total_timesteps)
            self._on_step()
            self._send_summary(tracked._replace(step=tracked.step._replace(final_obs=None)), n_steps)
            self._process_summaries(device_env, log_interval, everything=self.num_timesteps >= self._total_timesteps)
        callback.on_rollout_end()
        return RolloutReturn(n_steps * env.num_envs, self._episode_num - n_episodes, continue_training=True)

    def _choose_actions(self: Any, obs: Observations, learning_starts: int) -> th.Tensor:
        """Choose actions epsilon-greedily. Draws the same random numbers as SB3, in the same order."""
        is_warm_up = self.num_timesteps < learning_starts
        if is_warm_up or np.random.rand() < self.exploration_rate:
            return upload(random_actions(self.action_space, self.n_envs), self.device)
        with th.no_grad():
            actions: th.Tensor = self.policy._predict(obs, deterministic=False)
        return actions

    def _process_summaries(self: Any, env: DeviceVecEnv, log_interval: int | None, everything: bool) -> None:
        """Record episodes that have ended, and write the log after every ``log_interval`` episodes."""
        for summary, _, _ in self._arrived_summaries(everything):
            episodes = env.episodes(summary)
            self.ep_info_buffer.extend(episodes.values())
            for _ in episodes:
                self._episode_num += 1
                if log_interval is not None and self._episode_num % log_interval == 0:
                    self.dump_logs()


def random_actions(space: spaces.Space[Any], n: int) -> npt.NDArray[Any]:
    """The actions that ``n`` calls of ``space.sample()`` would return."""
    if type(space) is spaces.Discrete:
        return np.asarray(space.start + space.np_random.integers(int(space.n), size=n))
    return np.array([space.sample() for _ in range(n)])


@contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """Turn off the argument checks of torch's distributions, which would make the host wait for the device."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
