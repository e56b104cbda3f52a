"""Run a model in an environment, and add the transitions to buffers as SB3's algorithms do."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv, VecMonitor, is_vecenv_wrapped, unwrap_vec_normalize

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.recording.record_buffer import BaseRecordBuffer, RecordBuffer

AnyBuffer = BaseBuffer | BaseRecordBuffer


class Step(NamedTuple):
    """One step of all environments. Replay buffers store original values, rollout buffers normalized ones."""

    obs: Any
    normalized_obs: Any
    """What the model saw. Equals ``obs`` without ``VecNormalize``, as ``normalized_rewards`` equals ``rewards``."""
    actions: npt.NDArray[Any]
    next_obs: Any
    """At the end of an episode its terminal observation, not the first of the next episode."""
    rewards: npt.NDArray[Any]
    normalized_rewards: npt.NDArray[Any]
    episode_starts: npt.NDArray[np.bool_]
    dones: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]
    episode_returns: dict[int, float]
    """The return of every episode that ended, by environment. Losing a life does not end an episode."""


class Collector:
    """Steps an environment with a model, and adds every step to buffers. ``model`` only needs SB3's ``predict``."""

    def __init__(
        self,
        env: VecEnv,
        model: Any,
        deterministic: bool,
        buffer: AnyBuffer | Iterable[AnyBuffer] | None = None,
    ) -> None:
        self.env = env
        self.model = model
        self.deterministic = deterministic
        self._normalizer = unwrap_vec_normalize(env)
        self._is_monitored = is_vecenv_wrapped(env, VecMonitor) or env.env_is_wrapped(Monitor)[0]
        self._returns = np.zeros(env.num_envs)
        self._starts = np.ones(env.num_envs, dtype=bool)
        self._state: Any = None
        self._normalized_obs: Any = env.reset()
        self.obs: Any = self._original_obs(self._normalized_obs)
        buffers = (buffer,) if isinstance(buffer, BaseBuffer | BaseRecordBuffer) else buffer or ()
        self.writers = [_writer_for(one, self) for one in buffers]

    def step(self) -> Step:
        actions, self._state = self.model.predict(
            self._normalized_obs, state=self._state, episode_start=self._starts, deterministic=self.deterministic
        )
        normalized_obs, normalized_rewards, dones, infos = self.env.step(actions)
        obs = self._original_obs(normalized_obs)
        rewards = normalized_rewards if self._normalizer is None else self._normalizer.get_original_reward()
        step = Step(
            obs=self.obs,
            normalized_obs=self._normalized_obs,
            actions=actions,
            next_obs=self._with_terminal_obs(obs, dones, infos),
            rewards=rewards,
            normalized_rewards=normalized_rewards,
            episode_starts=self._starts,
            dones=dones,
            infos=infos,
            episode_returns=self._ended_returns(rewards, dones, infos),
        )
        self._normalized_obs, self.obs, self._starts = normalized_obs, obs, dones
        for writer in self.writers:
            writer.write(step)
        return step

    @property
    def add_seconds(self) -> list[float]:
        """The time spent in ``add`` of each buffer."""
        return [writer.seconds for writer in self.writers]

    def _original_obs(self, normalized_obs: Any) -> Any:
        return normalized_obs if self._normalizer is None else self._normalizer.get_original_obs()

    def _with_terminal_obs(self, obs: Any, dones: npt.NDArray[np.bool_], infos: list[dict[str, Any]]) -> Any:
        """``obs``, but for the environments that were reset the last observation before the reset."""
        ended = [i for i in np.flatnonzero(dones).tolist() if infos[i].get("terminal_observation") is not None]
        if not ended:
            return obs
        next_obs = deepcopy(obs)
        for i in ended:
            terminal = infos[i]["terminal_observation"]
            if self._normalizer is not None:
                terminal = self._normalizer.unnormalize_obs(terminal)
            if isinstance(next_obs, dict):
                for key in next_obs:
                    next_obs[key][i] = terminal[key]
            else:
                next_obs[i] = terminal
        return next_obs

    def _ended_returns(
        self, rewards: npt.NDArray[Any], dones: npt.NDArray[np.bool_], infos: list[dict[str, Any]]
    ) -> dict[int, float]:
        self._returns += rewards
        ended = {i: float(self._returns[i]) for i in np.flatnonzero(dones).tolist()}
        self._returns[dones] = 0
        if self._is_monitored:  # Monitor is inside the wrapper that reports a lost life as the end of an episode
            return {i: float(infos[i]["episode"]["r"]) for i in ended if "episode" in infos[i]}
        return ended


class BufferWriter(ABC):
    """Adds steps to one buffer, and measures how long ``add`` takes."""

    def __init__(self, buffer: Any, collector: Collector) -> None:
        self.buffer = buffer
        self.collector = collector
        self.seconds = 0.0
        self.n_envs = getattr(buffer, "n_envs", 1)
        if self.n_envs > collector.env.num_envs:
            raise ConfigurationError(
                f"The buffer is for {self.n_envs} environments, but there are only {collector.env.num_envs}. "
                "Give both the same n_envs."
            )

    def write(self, step: Step) -> None:
        arguments = self._arguments(step)
        if arguments is not None:
            start = time.perf_counter()
            self.buffer.add(*arguments)
            self.seconds += time.perf_counter() - start

    @property
    def is_full(self) -> bool:
        return bool(self.buffer.full)

    @property
    def capacity(self) -> int:
        """How many steps of each environment the buffer can hold."""
        return int(self.buffer.buffer_size)

    @abstractmethod
    def _arguments(self, step: Step) -> tuple[Any, ...] | None:
        """The arguments of ``add``, or ``None`` to add nothing."""

    def _first_envs(self, values: Any) -> Any:
        """The rows of the environments that the buffer is for: the first ones, if there are more."""
        if isinstance(values, dict):
            return {key: value[: self.n_envs] for key, value in values.items()}
        return values[: self.n_envs]


class ReplayWriter(BufferWriter):
    def _arguments(self, step: Step) -> tuple[Any, ...]:
        actions = step.actions
        space = self.buffer.action_space
        if isinstance(space, spaces.Box):  # off-policy algorithms store actions scaled to [-1, 1]
            actions = 2.0 * ((actions - space.low) / (space.high - space.low)) - 1.0
        fields = (step.obs, step.next_obs, actions, step.rewards, step.dones, step.infos)
        return tuple(map(self._first_envs, fields))


class RolloutWriter(BufferWriter):
    """Adds steps until the rollout is full."""

    def __init__(self, buffer: Any, collector: Collector) -> None:
        super().__init__(buffer, collector)
        self.policy: Any = getattr(collector.model, "policy", None)
        if not hasattr(self.policy, "evaluate_actions"):
            raise ConfigurationError(
                f"{type(buffer).__name__} also stores values and log-probabilities, which "
                f"{type(collector.model).__name__} does not compute: use one of PPO, A2C or the like."
            )

    def _arguments(self, step: Step) -> tuple[Any, ...] | None:
        if self.is_full:
            return None
        obs, actions, rewards = map(self._first_envs, (step.normalized_obs, step.actions, step.normalized_rewards))
        policy = self.policy
        policy.set_training_mode(False)
        with th.no_grad():
            values, log_probs, _ = policy.evaluate_actions(
                policy.obs_to_tensor(obs)[0], th.as_tensor(actions, device=policy.device)
            )
            rewards = rewards.copy()
            for i in np.flatnonzero(step.dones[: self.n_envs]).tolist():  # bootstrap after a timeout, as SB3 does
                info = step.infos[i]
                if info.get("TimeLimit.truncated", False) and info.get("terminal_observation") is not None:
                    terminal, _ = policy.obs_to_tensor(info["terminal_observation"])
                    rewards[i] += self.buffer.gamma * policy.predict_values(terminal)[0].item()
        if isinstance(self.buffer.action_space, spaces.Discrete):
            actions = actions.reshape(-1, 1)
        return obs, actions, rewards, self._first_envs(step.episode_starts), values, log_probs


class RecordWriter(BufferWriter):
    """Records the first environment: its observations if they fit the buffer's frames, else what it renders."""

    def __init__(self, buffer: Any, collector: Collector) -> None:
        super().__init__(buffer, collector)
        self._frame = self._current_frame()

    @property
    def is_full(self) -> bool:
        return len(self.buffer) == self.capacity

    @property
    def capacity(self) -> int:
        return self.buffer.max_size if isinstance(self.buffer, RecordBuffer) else 0

    def _arguments(self, step: Step) -> tuple[Any, ...]:
        frame, self._frame = self._frame, self._current_frame()
        return frame, step.rewards[0], step.actions[0]

    def _current_frame(self) -> Any:
        obs = self.collector.obs
        if not isinstance(self.buffer, RecordBuffer) or not self.buffer.has_frames:
            return None
        if not isinstance(obs, dict) and self.buffer.fits(obs[0].shape):
            return obs[0].copy()
        return self.collector.env.env_method("render", indices=0)[0]


def _writer_for(buffer: AnyBuffer, collector: Collector) -> BufferWriter:
    kinds = ((ReplayBuffer, ReplayWriter), (RolloutBuffer, RolloutWriter), (BaseRecordBuffer, RecordWriter))
    for kind, writer in kinds:
        if isinstance(buffer, kind):
            return writer(buffer, collector)
    raise ConfigurationError(f"A {type(buffer).__name__} is not a replay, rollout or record buffer. Pass one of these.")
